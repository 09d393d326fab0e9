"""Numeric core of Halfsafe: torch, numpy and safetensors, on any ``nn.Module``, without ComfyUI."""
