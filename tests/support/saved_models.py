"""Models loaded, saved and read again through the nodes, of the pack and of ComfyUI."""

import torch

LAYER, KEPT = "blocks.0.ffn.0", "text_embedding.0"


def load(comfy, name, storage="fp8_e4m3fn", compute="fp32", rules=None):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=name, storage=storage, compute=compute, rules=rules)[0]


def save(comfy, model, folder, storage="as_file", rules=None, prefix="diffusion_models/saved"):
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    (name,) = node.execute(model, prefix, storage, rules).args
    return folder.parent / name


def stock(comfy, path, compute=torch.float32):
    """A saved file through stock UNETLoader and stock ModelComputeDtype."""
    (model,) = comfy.core["UNETLoader"]().load_unet(path.name, "default")
    model.set_model_compute_dtype(compute)
    return model


def with_lora(comfy, model, file, strength=1.0):
    return comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, file.name, strength)[0]
