"""Writers of model files as the real tools lay them out. Each takes 16-bit reference weights and biases by layer name."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def reference(
    layers: tuple[str, ...] = ("blocks.0.ffn.0", "blocks.0.ffn.2"),
    shape: tuple[int, int] = (256, 384),
    std: float = 0.02,
) -> tuple[Weights, Weights]:
    """bf16 weights and biases, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    weights = {layer: (torch.randn(shape, generator=generator) * std).bfloat16() for layer in layers}
    return weights, {layer: torch.randn(shape[0], generator=generator).bfloat16() for layer in layers}


def per_tensor(weight: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and 0-dim fp32 multiplier, amax at the format's maximum, as ModelOpt and ComfyUI scale."""
    scale = weight.float().abs().max() / torch.finfo(dtype).max
    return _cast(weight.float() / scale, dtype), scale


def per_row(weight: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and (N, 1) fp32 multipliers."""
    scale = weight.float().abs().amax(1, keepdim=True) / torch.finfo(dtype).max
    return _cast(weight.float() / scale, dtype), scale


def per_block(weight: torch.Tensor, rows: int = 128, columns: int = 128, dtype: torch.dtype = E4M3):
    """Data and (ceil(N / rows), ceil(K / columns)) fp32 multipliers, the last blocks short, as DeepSeek-V3 writes."""
    data = torch.empty(weight.shape, dtype=dtype)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            data[block], scales[i, j] = per_tensor(weight[block], dtype)
    return data, scales


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return tensor.clamp(-limit, limit).to(dtype)


def comfy_quant_bytes(settings: dict) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def save(
    path: Path, tensors: Weights, biases: Weights, metadata: dict[str, str] | None = None, prefix: str = ""
) -> Path:
    biased = {f"{prefix}{layer}.bias": bias for layer, bias in biases.items()}
    named = {name if name.startswith(prefix) else prefix + name: tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in (named | biased).items()}, path, metadata)
    return path


def plain(path: Path, weights: Weights, biases: Weights, dtype: torch.dtype = torch.bfloat16) -> Path:
    """16- or 32-bit weights, or fp8 without a scale (UNETLoader's cast, many uploads)."""
    return save(path, {f"{layer}.weight": _cast(weight.float(), dtype) for layer, weight in weights.items()}, biases)


def _scaled(
    weights: Weights,
    scale_name: str,
    quantize: Callable = per_tensor,
    scale_dtype: torch.dtype = torch.float32,
    **options,
) -> Weights:
    tensors = {}
    for layer, weight in weights.items():
        data, scale = quantize(weight, **options)
        tensors |= {f"{layer}.weight": data, f"{layer}.{scale_name}": scale.to(scale_dtype)}
    return tensors


def comfy_quant(path: Path, weights: Weights, biases: Weights, dtype=E4M3, settings: dict | None = None) -> Path:
    """ComfyUI 0.4 and later: one JSON tensor per layer."""
    declared = {"format": str(dtype).removeprefix("torch.")} | (settings or {})
    markers = {f"{layer}.comfy_quant": comfy_quant_bytes(declared) for layer in weights}
    return save(path, _scaled(weights, "weight_scale", dtype=dtype) | markers, biases, {"format": "pt"})


def quantization_metadata(path: Path, weights: Weights, biases: Weights, settings: dict | None = None) -> Path:
    """ComfyUI's header form: ``_quantization_metadata``."""
    layers = {layer: {"format": "float8_e4m3fn"} | (settings or {}) for layer in weights}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    return save(path, _scaled(weights, "weight_scale"), biases, metadata)


def scaled_fp8(
    path: Path, weights: Weights, biases: Weights, dtype=E4M3, marker=None, prefix="", input_scale=None
) -> Path:
    """ComfyUI before 0.4 (``flux_dev_fp8_scaled``): an empty marker of the fp8 dtype, ``scale_weight``, ``scale_input``."""
    tensors = _scaled(weights, "scale_weight", dtype=dtype)
    if input_scale is not None:
        tensors |= {f"{layer}.scale_input": torch.tensor(input_scale) for layer in weights}
    tensors["scaled_fp8"] = torch.empty(0, dtype=dtype) if marker is None else marker
    return save(path, tensors, biases, prefix=prefix)


def modelopt(path: Path, weights: Weights, biases: Weights, dtype=E4M3, scale_dtype=torch.float32) -> Path:
    """NVIDIA ModelOpt and vLLM, per tensor: no marker, static input scales, scales of the attention cache."""
    tensors = _scaled(weights, "weight_scale", dtype=dtype, scale_dtype=scale_dtype)
    for layer in weights:
        tensors[f"{layer}.input_scale"] = torch.tensor(0.5)
        tensors |= {f"{layer}.{name}": torch.tensor(1.5) for name in ("k_scale", "v_scale")}
    return save(path, tensors, biases, {"format": "pt"})


def row_wise(path: Path, weights: Weights, biases: Weights, scale_dtype=torch.bfloat16, flat=False) -> Path:
    """compressed-tensors and vLLM, per channel: (N, 1) scales in bf16, or (N,)."""
    quantize = (lambda weight: (per_row(weight)[0], per_row(weight)[1].flatten())) if flat else per_row
    return save(path, _scaled(weights, "weight_scale", quantize, scale_dtype), biases, {"format": "pt"})


def block_wise(
    path: Path, weights: Weights, biases: Weights, scale_name="weight_scale_inv", rows=128, columns=128
) -> Path:
    """DeepSeek-V3 and Qwen (``weight_scale_inv``), DeepSeek's own inference files (``scale``), 1 x K groups."""
    return save(path, _scaled(weights, scale_name, per_block, rows=rows, columns=columns), biases, {"format": "pt"})


def native(path: Path, weights: Weights, biases: Weights) -> Path:
    """nvfp4, mxfp8, int8 and convrot layers by turns, in the shapes ComfyUI's kernels expect; the values mean nothing."""
    makers = (_nvfp4, _mxfp8, _int8, _convrot)
    tensors = {}
    for number, (layer, weight) in enumerate(weights.items()):
        tensors |= {f"{layer}.{leaf}": value for leaf, value in makers[number % 4](*weight.shape).items()}
    return save(path, tensors, biases, {"format": "pt"})


def _nvfp4(rows: int, columns: int) -> Weights:
    return {
        "weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "weight_scale": torch.ones(rows, columns // 16).to(E4M3),
        "weight_scale_2": torch.tensor(0.01),
        "input_scale": torch.tensor(0.02),
        "comfy_quant": comfy_quant_bytes({"format": "nvfp4"}),
    }


def _mxfp8(rows: int, columns: int) -> Weights:
    return {
        "weight": torch.ones(rows, columns).to(E4M3),
        "weight_scale": torch.full((rows, columns // 32), 127, dtype=torch.uint8),
        "comfy_quant": comfy_quant_bytes({"format": "mxfp8"}),
    }


def _int8(rows: int, columns: int) -> Weights:
    return {
        "weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8),
        "weight_scale": torch.full((rows, 1), 0.01),
        "comfy_quant": comfy_quant_bytes({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group(columns)}),
    }


def _convrot(rows: int, columns: int) -> Weights:
    return {
        "weight": torch.randint(-127, 128, (rows, columns // 2), dtype=torch.int8),
        "weight_scale": torch.full((rows,), 0.01),
        "comfy_quant": comfy_quant_bytes({"format": "convrot_w4a4", "convrot_groupsize": group(columns)}),
    }


def group(columns: int) -> int:
    """How many columns are rotated together: a power of four that divides them."""
    return next(size for size in (256, 64, 16) if columns % size == 0)
