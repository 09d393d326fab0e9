"""Files on disk: safetensors read and written whole, headers checked, bytes that are another format recognised."""
