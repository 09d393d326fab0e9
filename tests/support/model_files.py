"""Model files for the host tests: tensors of a file, files damaged on purpose, a Wan model in another tool's format."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from halfsafe.precision.files.safetensors_file import TensorSpec, open_checkpoint, write_safetensors
from safetensors.torch import load_file, save_file

WAN_LINEARS = tuple(
    f"blocks.{block}.{layer}"
    for block in (0, 1)
    for layer in ("ffn.0", "ffn.2", *(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"))
)


def changed(source: Path, target: Path, change: Callable[[dict], object], metadata: dict | None = None) -> Path:
    """A copy of a file whose tensors ``change`` has altered in place."""
    tensors = load_file(source)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata)
    return target


def in_parts(source: Path, folder: Path, stem: str) -> list[Path]:
    """A model file in two, as diffusers saves a large one: the second has all that is of blocks."""
    tensors = load_file(source)
    blocks = {name: tensors.pop(name) for name in list(tensors) if "blocks" in name}
    paths = [folder / f"{stem}-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for path, part in zip(paths, (tensors, blocks), strict=True):
        save_file(part, path)
    return paths


def in_dialect(
    source: Path, target: Path, write: Callable, prefix: str = "", layers: Sequence[str] = WAN_LINEARS, **options
) -> Path:
    """The Wan model of ``source`` with the layers of its blocks as ``write``, of `support.dialects`, stores them."""
    tensors = load_file(source)
    weights = {layer: tensors.pop(f"{layer}.weight") for layer in layers}
    write(target, weights, {layer: tensors.pop(f"{layer}.bias") for layer in layers}, **options)
    file = open_checkpoint(target)
    whole = {prefix + name: tensor.clone() for name, tensor in file.items()} | {
        prefix + name: tensor for name, tensor in tensors.items()
    }
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()]
    write_safetensors(target, specs, whole.items(), file.metadata)
    return target


def raw(target: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header, its length field true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    target.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return target


def lora(
    layers: dict[str, tuple[int, int]], rank: int = 4, size: float = 1.0, seed: int = 5
) -> dict[str, torch.Tensor]:
    """A LoRA in diffusers' format for Linear layers of the given (outputs, inputs)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (outputs, inputs) in layers.items():
        tensors[f"diffusion_model.{layer}.lora_A.weight"] = (
            torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        )
        tensors[f"diffusion_model.{layer}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size
    return tensors


def lora_delta(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """What a LoRA of strength 1 adds to a layer's weight."""
    up, down = (tensors[f"diffusion_model.{layer}.lora_{part}.weight"] for part in "BA")
    return up @ down
