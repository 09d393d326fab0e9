"""What tests of saved models share."""

from pathlib import Path

import pytest
from safetensors.torch import save_file
from support import model_files, saved_models


@pytest.fixture(scope="module")
def saved_folder(comfy):
    """output/diffusion_models, which ComfyUI's main program adds to the folders it looks in."""
    import folder_paths

    folder = Path(folder_paths.get_output_directory()) / "diffusion_models"
    folder_paths.add_model_folder_path("diffusion_models", str(folder))
    return folder


@pytest.fixture(scope="module")
def lora_file(models_dir):
    path = models_dir / "loras" / "wan-lora.safetensors"
    save_file(model_files.lora({saved_models.LAYER: (1024, 256), saved_models.KEPT: (256, 4096)}, size=0.1), path)
    return path
