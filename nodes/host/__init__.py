"""The only place that touches ComfyUI's internals. It carries decisions out; it makes none."""
