"""Loading and saving through ComfyUI's own loaders."""
