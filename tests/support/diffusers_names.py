"""Models under diffusers' names, by ComfyUI's own tables read backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.comfy_format import tensors_of
from halfsafe.precision.formats.layer_plan import AS_FILE
from halfsafe.precision.plan.layers import why_not_quantized
from safetensors.torch import load_file, save_file
from support import families, tiny_models

Tensors = dict[str, torch.Tensor]


def table(family: str, tensors: Mapping[str, torch.Tensor], unet_config: dict | None = None) -> dict:
    """ComfyUI's table of a family: name -> its name, with rows and a change where it fuses or reorders."""
    from comfy import utils

    def count(stack: str) -> int:
        return len({name.split(".")[1] for name in tensors if name.startswith(f"{stack}.")})

    if family == "flux":
        sizes = {"depth": count("double_blocks"), "depth_single_blocks": count("single_blocks")}
        return utils.flux_to_diffusers({**sizes, "hidden_size": len(tensors["img_in.bias"])})
    if family == "sd3":
        return utils.mmdit_to_diffusers({"depth": count("joint_blocks")})
    if family == "auraflow":
        sizes = {"n_double_layers": count("double_layers")}
        return utils.auraflow_to_diffusers({**sizes, "n_layers": count("double_layers") + count("single_layers")})
    if family == "pixart":
        return utils.pixart_to_diffusers({"depth": count("blocks")})
    if family == "z_image":
        sizes = {"n_layers": count("layers"), "dim": tensors["layers.0.attention.out.weight"].shape[0]}
        return utils.z_image_to_diffusers(sizes)
    return utils.unet_to_diffusers(unet_config or tiny_models.sd15_unet_config())


def renamed(family: str, tensors: Tensors, unet_config: dict | None = None) -> Tensors:
    """The tensors of a model of a family with diffusers' names."""
    found: Tensors = {}
    places = set()
    for name, place in table(family, tensors, unet_config).items():
        key, cut, change = (place, None, None) if isinstance(place, str) else (*place, None)[:3]
        # LyCORIS, Flux.2 and models with classes have second names for some, of the same place or of the whole.
        is_second = (key, cut) in places or (cut is None and any(key == other for other, _ in places))
        if key in tensors and not is_second and not name.startswith("class_embedding."):
            places.add((key, cut))
            part = tensors[key] if cut is None else tensors[key].narrow(*cut)
            found[name] = (change(part) if change else part).clone()  # a swap of two halves is its own inverse
    return found


def write(family: str, source: Path, target: Path) -> Path:
    """Write the file of a model of a family under diffusers' names."""
    save_file(renamed(family, load_file(source)), target, families.metadata_of(source))
    return target


def quantize(source: Path, target: Path, storage: str, within: str = "") -> Path:
    """Write a file with each layer that fits a storage in it, under the names that it has, as other tools do. ``within``: part of the names of those layers."""
    file = open_checkpoint(source)
    tensors: Tensors = {}
    for name, weight in read_checkpoint(file, file.metadata, source).weights.items():
        fits = (
            within in name
            and len(weight.shape) == 2
            and name.endswith(".weight")
            and not why_not_quantized(storage, weight.shape)
        )
        tensors |= tensors_of(weight, storage if fits else AS_FILE, source)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, target, families.metadata_of(source))
    return target


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "flux": tiny_models.flux,
    "sd3": tiny_models.sd3,
    "z_image": tiny_models.NARROW["z_image"],
    "sd15": tiny_models.sd15_unet,
}
