"""ComfyUI's own quantization format out: one weight at a time, into memory or into a file.

A quantized layer is ``<layer>.weight`` (fp8), ``<layer>.weight_scale`` (fp32, 0-dim), ``<layer>.comfy_quant`` (JSON as
uint8) and, if known, ``<layer>.input_scale`` (ComfyUI ``comfy/ops.py``, ``_load_quantized_module``).
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import Checkpoint, StoredWeight, comfy_quant_tensor, looks_like_scale, read_checkpoint
from .dtypes import FP8_NAMES, dtype_named, max_of, name_of
from .errors import CheckpointError, NonFiniteWeight
from .plan import StorageDecision, layers_of, plan_storage, rules_without_effect
from .quantize import absolute_max, quantize
from .rules import Rules
from .safetensors_file import TensorFile, TensorSpec, open_checkpoint, write_safetensors

MODEL_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
WHOLE_PREFIXES = ("diffusion_model.", "model.", "transformer.")
REQUANTIZATION_LIMIT = {"fp8_e4m3fn": 0.04, "fp8_e5m2": 0.08}
LARGEST_ROUNDED = max_of(torch.float32) / 2
ERROR_SAMPLE = 8
_OF_FNUZ = {"fp8_e4m3fnuz": "fp8_e4m3fn", "fp8_e5m2fnuz": "fp8_e5m2"}
_UNCHANGED = "as_file"


@dataclass(frozen=True)
class StoredResult:
    """A weight in ComfyUI's format: its tensors by full name, what they are stored in, and why not as asked."""

    tensors: dict[str, torch.Tensor]
    storage: str
    note: str | None = None


@dataclass(frozen=True)
class ConvertSummary:
    """What :func:`convert_file` did. ``weights`` counts weights per storage; ``kept`` holds (layer, reason)."""

    source: str
    target: str
    dialect: str
    source_bytes: int
    target_bytes: int
    seconds: float
    weights: dict[str, int]
    kept: list[tuple[str, str]]
    notes: list[str]


@dataclass(frozen=True)
class Outcome:
    """What a weight is stored in (``as_file``: unchanged), and why not as asked."""

    storage: str
    note: str | None = None


def stored_tensors(weight: StoredWeight, storage: str, path) -> StoredResult:
    """A weight in ComfyUI's format. fp8 with one scale stays as it is; other scales are brought to one power of two.

    Args:
        storage: ``as_file`` (or ``auto``), or a dtype name. Where it cannot be had the result's note says why.

    Raises:
        NonFiniteWeight: the weight holds NaN or Inf.
    """
    return _produce(weight, _outcome(weight, storage, path), path)


def state_dict(
    checkpoint: Checkpoint, decisions: dict[str, str], progress: Callable[[int], None] | None = None
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str]]]:
    """The checkpoint in ComfyUI's format, made weight by weight; and (tensor, note) where it is not stored as asked.

    Weights that do not change stay views of the file; every weight is checked for NaN and Inf.

    Args:
        decisions: full layer name (without ``.weight``) -> storage; other tensors stay as in the file.
        progress: called with the bytes of the file just dealt with.
    """
    result, notes = {}, []
    for weight, outcome in _outcomes(checkpoint.weights, decisions, checkpoint.path):
        result.update(_produce(weight, outcome, checkpoint.path).tensors)
        if outcome.note:
            notes.append((weight.name, outcome.note))
        if progress:
            progress(weight.data.nbytes)
    return result, notes


def check_finite(tensors: Mapping[str, torch.Tensor], path) -> None:
    """Raise :class:`NonFiniteWeight` for the first floating tensor that holds NaN or Inf."""
    for name, tensor in tensors.items():
        _finite_bound(StoredWeight(name, tensor), path)


def storage_to_make(weight: StoredWeight, wanted: str) -> str:
    """``wanted``, or ``as_file`` from one 16- or 32-bit dtype to another: ComfyUI casts as it loads, with no second copy."""
    return wanted if wanted in FP8_NAMES or weight.scale is not None or weight.eight_bit else _UNCHANGED


def beyond_fp16(checkpoint: Checkpoint, prefix: str = "") -> str | None:
    """The first tensor below ``prefix`` with a value that fp16 cannot hold, or None."""
    inside = (weight for name, weight in checkpoint.weights.items() if name.startswith(prefix))
    return next((weight.name for weight in inside if _passes_fp16(weight, checkpoint.path)), None)


def convert_file(
    source: str | os.PathLike,
    target: str | os.PathLike,
    storage: str,
    rules: Rules,
    progress: Callable[[int], None] | None = None,
) -> ConvertSummary:
    """Convert a file, or a sharded set into one file, holding one weight at a time. Every weight is checked for NaN/Inf.

    Args:
        progress: called with the bytes of the source just dealt with, :attr:`TensorFile.data_bytes` in all.

    Raises:
        CheckpointError: source unreadable, damaged or a LoRA; target not writable or the same file; NaN or Inf.
    """
    began = time.perf_counter()
    file = open_checkpoint(source)
    _refuse_same_file(file, Path(target))
    checkpoint = read_checkpoint(file, file.metadata, source)
    refuse_lora(checkpoint)
    decisions = decide(checkpoint, storage, rules)
    wanted = {name: decision.storage for name, decision in decisions.items()}
    metadata = {"format": "pt"} | checkpoint.metadata
    outcomes = write_weights(target, checkpoint.weights, wanted, metadata, progress, source, file.release)
    if progress:
        progress(file.data_bytes - sum(weight.data.nbytes for weight in checkpoint.weights.values()))
    return ConvertSummary(
        str(source),
        str(target),
        checkpoint.dialect,
        file.data_bytes,
        os.path.getsize(target),
        time.perf_counter() - began,
        dict(Counter(_shown(checkpoint.weights[name], outcome) for name, outcome in outcomes.items())),
        [(name, decision.reason) for name, decision in decisions.items() if decision.kept],
        [
            *checkpoint.notes,
            *(f"{rule}: {why}" for rule, why in rules_without_effect(layers_of(checkpoint, model_prefix(checkpoint)), rules)),
            *(f"{name}: {outcome.note}" for name, outcome in outcomes.items() if outcome.note),
        ],
    )


def write_weights(
    target: str | os.PathLike,
    weights: Mapping[str, StoredWeight],
    storages: Mapping[str, str],
    metadata: dict[str, str],
    progress: Callable[[int], None] | None = None,
    origin: str | os.PathLike = "model",
    release: Callable[[str], None] = lambda name: None,
) -> dict[str, Outcome]:
    """Write weights to a file in ComfyUI's format, one at a time; each is asked for twice, first for its size.

    Args:
        storages: full layer name -> storage; other tensors stay as they are.
        origin: what errors name as the place of a bad weight.
        release: called with the name of a weight that is written.

    Returns:
        What each weight was stored in.

    Raises:
        NonFiniteWeight: a weight holds NaN or Inf.
        CheckpointError: the target cannot be written.
    """
    outcomes, specs = {}, []
    for weight, outcome in _outcomes(weights, storages, origin):
        outcomes[weight.name] = outcome
        specs += _specs(weight, outcome)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            yield from _produce(weight, outcomes[name], origin).tensors.items()
            release(name)
            if progress:
                progress(weight.data.nbytes)

    write_safetensors(target, specs, tensors(), metadata)
    return outcomes


def decide(checkpoint: Checkpoint, storage: str, rules: Rules) -> dict[str, StorageDecision]:
    """A storage decision per layer of the diffusion model, by full layer name; a bundled VAE or CLIP has none."""
    prefix = model_prefix(checkpoint)
    decisions = plan_storage(layers_of(checkpoint, prefix), storage, rules)
    return {prefix + name: decision for name, decision in decisions.items()}


def model_prefix(checkpoint: Checkpoint) -> str:
    """What precedes the diffusion model's own names in the file; as in ComfyUI's ``unet_prefix_from_state_dict``."""
    names = list(checkpoint.weights)
    inside = next((prefix for prefix in MODEL_PREFIXES if any(name.startswith(prefix) for name in names)), None)
    return inside or next((prefix for prefix in WHOLE_PREFIXES if all(name.startswith(prefix) for name in names)), "")


def _refuse_same_file(file: TensorFile, target: Path) -> None:
    if target.exists() and any(target.samefile(source) for source in file.files):
        raise CheckpointError(target, "source and target are the same file", advice="Give the result another name.")


def refuse_lora(checkpoint: Checkpoint) -> None:
    """Raise :class:`CheckpointError` for a LoRA, which is no model."""
    name = next((name for name in checkpoint.weights if "lora_" in name), None)
    if name is not None:
        raise CheckpointError(checkpoint.path, "a LoRA, which is applied in 16 bit", name, "Convert the model instead.")


def _outcome(weight: StoredWeight, storage: str, path) -> Outcome:
    """What a weight will be stored in. Looks into the data only where the answer depends on it."""
    if weight.granularity == "native":
        asked_otherwise = storage not in ("auto", _UNCHANGED)
        return Outcome(_UNCHANGED, "stays in its own format, which only ComfyUI unpacks" if asked_otherwise else None)
    if weight.data.numel() == 0 or (weight.scale is None and not weight.is_number):
        return Outcome(_UNCHANGED)
    storage = _resolved(weight, storage)
    if storage in FP8_NAMES:
        return _fp8_outcome(weight, storage, path)
    if storage == "fp16" and _passes_fp16(weight, path):
        return Outcome("bf16", f"kept in bf16: values pass fp16's {max_of(torch.float16):.0f}")
    return Outcome(_UNCHANGED if storage == name_of(weight.data.dtype) and weight.scale is None else storage)


def _outcomes(weights: Mapping[str, StoredWeight], storages: Mapping[str, str], path) -> Iterator[tuple[StoredWeight, Outcome]]:
    """Every weight and what it will be stored in; 16 bit where a tensor beside it would be taken for its fp8 scale."""
    beside_scales = {name.rpartition(".")[0] for name in weights if looks_like_scale(name)}
    for weight in weights.values():
        outcome = _outcome(weight, storages.get(weight.layer, _UNCHANGED), path)
        if outcome.storage in FP8_NAMES and not weight.eight_bit and weight.layer in beside_scales:
            outcome = Outcome("bf16" if weight.scale is not None else _UNCHANGED, "a tensor beside it is named like a scale")
        yield weight, outcome


def _resolved(weight: StoredWeight, storage: str) -> str:
    if storage not in ("auto", _UNCHANGED):
        return storage
    own = name_of(weight.data.dtype)
    return _OF_FNUZ.get(own, "bf16" if own == "int8" else own)


def _fp8_outcome(weight: StoredWeight, storage: str, path) -> Outcome:
    if not _fits_linear(weight):
        return Outcome(
            "bf16" if weight.eight_bit else _UNCHANGED, "ComfyUI holds only the weights of Linear layers in fp8"
        )
    if weight.granularity in ("row", "block") or weight.data.dtype == torch.int8:
        error = _requantization_error(weight, dtype_named(storage), _finite_bound(weight, path))
        if error > REQUANTIZATION_LIMIT[storage]:
            return Outcome("bf16", f"kept in bf16: one scale instead of {weight.scale.numel()} costs {error:.1%}")
    return Outcome(storage)


def _fits_linear(weight: StoredWeight) -> bool:
    return weight.data.dim() == 2 and weight.name.endswith(".weight")


def _passes_fp16(weight: StoredWeight, path) -> bool:
    if weight.scale is None and weight.data.dtype == torch.float16:
        return False
    limit = max_of(torch.float16)
    if _finite_bound(weight, path) <= limit or weight.granularity in ("none", "tensor"):
        return _finite_bound(weight, path) > limit
    return any(part.abs().max() > limit for _, part in weight.parts())


def _finite_bound(weight: StoredWeight, path) -> float:
    """The largest magnitude of the dequantized weight; with several scales what the largest of them can give.

    Raises:
        NonFiniteWeight: it holds NaN or Inf, or passes fp32's range.
    """
    if weight.is_number:
        largest = absolute_max(weight.data)
    else:
        largest = 0.0 if weight.scale is None else float(torch.iinfo(weight.data.dtype).max + 1)
    if not math.isfinite(largest):
        raise NonFiniteWeight(path, "holds NaN or Inf", weight.name, "The file is damaged: download it again.")
    bound = largest if weight.scale is None else largest * weight.scale.max().item()
    if bound > max_of(torch.float32):
        raise NonFiniteWeight(path, "passes the range of fp32", weight.name, "The file is damaged: download it again.")
    return bound


def _requantization_error(weight: StoredWeight, dtype: torch.dtype, bound: float) -> float:
    """What bringing a weight to one scale costs, measured on a sample of its rows.

    The root mean square of each row's relative error: a small output channel counts like a large one.
    """
    squares, rows = 0.0, 0
    for _, part in weight.parts(sample=ERROR_SAMPLE):
        quantized = quantize(part, dtype, bound)
        error = (quantized.data.float() * quantized.scale - part).square().sum(1)
        squares += (error / part.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)).sum().item()
        rows += part.shape[0]
    return math.sqrt(squares / rows)


def _produce(weight: StoredWeight, outcome: Outcome, path) -> StoredResult:
    largest = _finite_bound(weight, path)
    if outcome.storage != _UNCHANGED and largest > LARGEST_ROUNDED:
        problem = f"holds values up to {largest:.3g}, which round to infinity in {outcome.storage}"
        raise NonFiniteWeight(path, problem, weight.name, "The file is damaged: download it again.")
    if outcome.storage == _UNCHANGED:
        tensors = {weight.name: weight.data, **weight.companions}
        return StoredResult(tensors, _shown(weight, outcome), outcome.note)
    if outcome.storage not in FP8_NAMES:
        dtype = dtype_named(outcome.storage)
        return StoredResult({weight.name: weight.dequantize(dtype)}, outcome.storage, outcome.note)
    data, scale = _fp8(weight, dtype_named(outcome.storage), largest)
    tensors = {weight.name: data, f"{weight.layer}.weight_scale": scale, **_fp8_companions(weight, data.dtype)}
    return StoredResult(tensors, outcome.storage, outcome.note)


def _shown(weight: StoredWeight, outcome: Outcome) -> str:
    if outcome.storage != _UNCHANGED:
        return outcome.storage
    return "native" if weight.granularity == "native" else name_of(weight.data.dtype)


def _fp8_companions(weight: StoredWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    settings = {"format": str(dtype).removeprefix("torch.")}
    if weight.full_precision:
        settings["full_precision_matrix_mult"] = True
    companions = {f"{weight.layer}.comfy_quant": comfy_quant_tensor(settings)}
    if weight.input_scale is not None:
        companions[f"{weight.layer}.input_scale"] = weight.input_scale
    return companions


def _fp8(weight: StoredWeight, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    one_scale = weight.granularity in ("none", "tensor")
    scale = torch.tensor(1.0) if weight.scale is None else weight.scale
    if one_scale and weight.data.dtype == dtype:
        return weight.data, scale
    if one_scale and _OF_FNUZ.get(name_of(weight.data.dtype)) == name_of(dtype):
        # The values of an fnuz format fit its sibling with the same scale; only its last subnormal bit is lost.
        return StoredWeight(weight.name, weight.data).dequantize(dtype), scale
    if weight.granularity == "none":
        quantized = quantize(weight.data, dtype, largest)
        return quantized.data, quantized.scale
    data = torch.empty(weight.data.shape, dtype=dtype)
    target = weight.matrix(data)
    for rows, part in weight.parts():
        quantized = quantize(part, dtype, largest)
        target[rows] = quantized.data
    return data, quantized.scale


def _specs(weight: StoredWeight, outcome: Outcome) -> list[TensorSpec]:
    """The tensors that :func:`_produce` will give, without making them."""
    if outcome.storage == _UNCHANGED:
        tensors = {weight.name: weight.data, **weight.companions}
        return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    dtype = dtype_named(outcome.storage)
    specs = [TensorSpec(weight.name, dtype, tuple(weight.data.shape))]
    if outcome.storage in FP8_NAMES:
        companions = {f"{weight.layer}.weight_scale": torch.tensor(1.0), **_fp8_companions(weight, dtype)}
        specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in companions.items()]
    return specs
