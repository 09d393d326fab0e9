"""Set up what the scripts need: an environment, a ComfyUI and its server, a browser, workflows as prompts."""
