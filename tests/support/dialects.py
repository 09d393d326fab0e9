"""Writers of model files as the real tools lay them out. Each takes 16-bit reference weights and biases by layer name."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def with_settings_in_header(path: Path, prefix: str = "", of_tensors: str | None = None) -> Path:
    """The same file with the ``comfy_quant`` of its layers in the header, its tensors below ``prefix``, and the names of layers in the header below
    ``of_tensors``, which is the same prefix unless given."""
    tensors = load_file(path)
    marks = {name: tensors.pop(name) for name in [*tensors] if name.endswith(".comfy_quant")}
    named = prefix if of_tensors is None else of_tensors
    layers = {
        named + name.removesuffix(".comfy_quant"): json.loads(mark.numpy().tobytes()) for name, mark in marks.items()
    }
    save_file(
        {prefix + name: tensor for name, tensor in tensors.items()},
        path,
        {"_quantization_metadata": json.dumps({"layers": layers})},
    )
    return path


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


def native(path: Path, weights: Weights, biases: Weights, names: Sequence[str] = ()) -> Path:
    """Layers by turns in each of :data:`NATIVE`, or of some, ComfyUI's formats other than scaled fp8, as its own tools write them."""
    tensors, chosen = {}, [*(names or NATIVE)]
    for number, (layer, weight) in enumerate(weights.items()):
        make = NATIVE[chosen[number % len(chosen)]]
        tensors |= {f"{layer}.{leaf}": value for leaf, value in make(weight.float()).items()}
    return save(path, tensors, biases, {"format": "pt"})


def in_format(path: Path, weights: Weights, biases: Weights, name: str, settings: dict | None = None) -> Path:
    """Every layer in one of :data:`NATIVE`; ``settings`` replace its ``comfy_quant``."""
    tensors = {}
    for layer, weight in weights.items():
        made = NATIVE[name](weight.float())
        if settings is not None:
            made["comfy_quant"] = comfy_quant_bytes(settings)
        tensors |= {f"{layer}.{leaf}": value for leaf, value in made.items()}
    return save(path, tensors, biases, {"format": "pt"})


@functools.cache
def rotation(size: int) -> torch.Tensor:
    """The normalized regular Hadamard matrix, entry by entry: the sign flips once for each base-4 digit pair that adds to 3."""

    def sign(i: int, j: int) -> int:
        flips = 0
        for _ in range(10):
            flips += (i % 4) + (j % 4) == 3
            i, j = i // 4, j // 4
        return -1 if flips % 2 else 1

    return torch.tensor([[sign(i, j) for j in range(size)] for i in range(size)]).float() / size**0.5


def _rotate(weight: torch.Tensor, size: int) -> torch.Tensor:
    return (weight.reshape(-1, size) @ rotation(size)).reshape(weight.shape)


def group_of(weight: torch.Tensor) -> int:
    return next(size for size in (256, 64, 16) if weight.shape[1] % size == 0)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Block scales as cuBLAS wants them: padded to 128 x 4; the tile of row r, column c holds them at (r % 32, r // 32, c)."""
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile, inside = (r // 128) * across + c // 4, (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    flat = torch.zeros(down * across * 512, dtype=torch.uint8)
    flat[tile * 512 + inside] = scales.view(torch.uint8)
    return flat.view(scales.dtype).reshape(down * 128, across * 4)


def _two_a_byte(numbers: torch.Tensor) -> torch.Tensor:
    """The first of two numbers in the low half of a byte."""
    numbers = numbers.int() & 15
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8).view(torch.int8)


def _four_a_byte(numbers: torch.Tensor) -> torch.Tensor:
    """The first of four numbers of 2 bits in the lowest bits of a byte."""
    numbers = numbers.int()
    return sum(numbers[:, i::4] << 2 * i for i in range(4)).to(torch.uint8).view(torch.int8)


def _int8(weight: torch.Tensor, rotated: bool = True) -> Weights:
    size = group_of(weight)
    turned = _rotate(weight, size) if rotated else weight
    scale = turned.abs().amax(1, keepdim=True) / 127
    settings = {"format": "int8_tensorwise"} | ({"convrot": True, "convrot_groupsize": size} if rotated else {})
    return {
        "weight": (turned / scale).round().clamp(-128, 127).to(torch.int8),
        "weight_scale": scale,
        "comfy_quant": comfy_quant_bytes(settings),
    }


def _int4(weight: torch.Tensor) -> Weights:
    size = group_of(weight)
    turned = _rotate(weight, size)
    scale = turned.abs().amax(1) / 7
    numbers = (turned / scale[:, None]).round().clamp(-7, 7)
    settings = {"format": "convrot_w4a4", "convrot_groupsize": size}
    return {"weight": _two_a_byte(numbers), "weight_scale": scale, "comfy_quant": comfy_quant_bytes(settings)}


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _nvfp4(weight: torch.Tensor) -> Weights:
    blocks = weight.reshape(weight.shape[0], -1, 16)
    scale = weight.abs().max() / (448 * 6)
    block = (blocks.abs().amax(2) / 6 / scale).clamp(max=448).to(E4M3)
    magnitudes = blocks / (block.float() * scale).clamp(min=1e-30)[:, :, None]
    codes = (magnitudes.abs().unsqueeze(-1) - FP4).abs().argmin(-1) + 8 * (magnitudes < 0)
    codes = codes.reshape(weight.shape).int()
    return {
        "weight": (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8),
        "weight_scale": tiled(block.view(torch.uint8)).view(E4M3),
        "weight_scale_2": scale,
        "input_scale": torch.tensor(0.02),
        "comfy_quant": comfy_quant_bytes({"format": "nvfp4"}),
    }


def _mxfp8(weight: torch.Tensor) -> Weights:
    blocks = weight.reshape(weight.shape[0], -1, 32)
    exponent = (blocks.abs().amax(2).clamp(min=1e-30) / 448).log2().ceil()
    data = (blocks / exponent.exp2()[:, :, None]).clamp(-448, 448).to(E4M3)
    scale = tiled((exponent + 127).to(torch.uint8))
    return {
        "weight": data.reshape(weight.shape),
        "weight_scale": scale,
        "comfy_quant": comfy_quant_bytes({"format": "mxfp8"}),
    }


def _w4a8(weight: torch.Tensor, bits: int = 4) -> Weights:
    largest = (1 << bits - 1) - 1
    size = group_of(weight)
    groups = _rotate(weight, size).reshape(weight.shape[0], -1, 16)
    each = groups.abs().amax(2) / largest
    channel = (each * largest).amax(1) / 127
    relative = (each / channel[:, None]).to(E4M3)
    steps = relative.float() * channel[:, None]
    codes = (groups / steps.clamp(min=1e-30)[:, :, None]).round().clamp(-largest, largest) + largest + 1
    codes = codes.reshape(weight.shape)
    settings = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": size}
    return {
        "weight": _two_a_byte(codes % 16)
        if bits == 4
        else torch.cat((_two_a_byte(codes % 16), _four_a_byte(codes // 16)), 1),
        "weight_s_rel": relative,
        "weight_s_channel": channel,
        "comfy_quant": comfy_quant_bytes(settings),
    }


def _w6a8(weight: torch.Tensor) -> Weights:
    return _w4a8(weight, 6)


def _awq4(weight: torch.Tensor) -> Weights:
    size = 64 if weight.shape[1] % 64 == 0 else 16
    groups = weight.reshape(weight.shape[0], -1, size)
    low = groups.amin(2)
    scale = ((groups.amax(2) - low) / 15).bfloat16()
    zeros = (low + 8 * scale.float()).bfloat16()
    codes = ((groups - zeros.float()[:, :, None]) / scale.float().clamp(min=1e-30)[:, :, None] + 8).round().clamp(0, 15)
    return {
        "weight": _two_a_byte(codes.reshape(weight.shape)),
        "weight_scale": scale.T,
        "weight_zeros": zeros.T,
        "comfy_quant": comfy_quant_bytes({"format": "awq_w4a16", "group_size": size}),
    }


NATIVE = {"nvfp4": _nvfp4, "mxfp8": _mxfp8, "int8": _int8, "int4": _int4, "w4a8": _w4a8, "awq4": _awq4, "w6a8": _w6a8}
