"""ComfyUI's classes that nodes name in their annotations; imported by type checkers only."""

from comfy.model_patcher import ModelPatcher
from comfy.sd import CLIP, VAE

__all__ = ["CLIP", "VAE", "ModelPatcher"]
