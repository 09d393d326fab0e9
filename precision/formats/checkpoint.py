"""Every way a model file stores quantized weights, read into one shape.

Sources: ComfyUI ``comfy/ops.py`` (``comfy_quant``), ``comfy/utils.py`` (``scaled_fp8``, ``_quantization_metadata``);
NVIDIA ModelOpt and vLLM (``weight_scale``, ``input_scale``, ``k_scale``); DeepSeek-V3 ``inference/kernel.py``
(``weight_scale_inv``, which despite its name multiplies) and ``inference/convert.py`` (the same as ``scale``);
musubi-tuner ``modules/fp8_optimization_utils.py`` (``scale_weight`` of three dimensions, ``scale_weight_tensor``).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..base.dtypes import FP8_DTYPES, name_of
from ..base.errors import CheckpointError, NonFiniteWeight, UnconsumedScale
from ..base.message import Message
from ..files.safetensors_header import read_object
from ..files.tensor_file import TensorFile
from ..files.zeros import zero_runs
from .fp8 import E4M3
from .int8 import rotation_group
from .registry import FORMATS, weight_in_format
from .stored_weight import (
    EIGHT_BIT,
    FULL_PRECISION,
    NUMBERS,
    NonFiniteScale,
    StoredWeight,
    block_sizes,
    granularity_of,
)

COMFY_QUANT = "comfy_quant"
SCALED_FP8 = "scaled_fp8"
QUANTIZATION_KEY = "_quantization_metadata"
CARD_KEY = "halfsafe"
MODEL_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
WHOLE_PREFIXES = ("diffusion_model.", "model.", "transformer.")
MAY_PRECEDE = ("", *MODEL_PREFIXES, *WHOLE_PREFIXES)
"""What may precede a layer's name in a file whose header names the layer without its prefix."""
READS_UP_TO = "0.38"
ROTATED_OR_NOT = (
    "int8 without comfy_quant, so whether the inputs are rotated is unknown; they are read as not rotated, which "
    "gives noise if they are: get the file from the model's publisher"
)
TILED_OR_NOT = (
    "a scale for each 32 inputs without comfy_quant, so whether the scales are tiled is unknown; they are read as "
    "rows, which gives noise if they are tiled: get the file from the model's publisher"
)
MX_BLOCK = 32
_DAMAGED = "The file is damaged: download it again."
_SCALE_LEAF = re.compile(r"(^|_)scales?(_|$)")
_PARAMETER = re.compile(r"(weight|bias)$")
_POSITIONS = re.compile(r"(ids|index|mask)$")
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "weight_scale_2", "scale_input")
_PARTS = frozenset(leaf for format in FORMATS.values() for leaf in format.needs)
_INPUT_SCALES = ("input_scale", "scale_input")
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "prob_output_scale", "output_scale")

_ORIGINAL = "Use the 16-bit or fp8 version of this model."
_FOREIGN = (
    (("wscales", "smooth_factor"), "a Nunchaku (SVDQuant) file", "Load it with the ComfyUI-nunchaku nodes."),
    (("absmax", "bitsandbytes__nf4", "SCB"), "a bitsandbytes file", "Load it with a bitsandbytes loader node."),
    (("svd_up", "svd_down", "zero_point"), "an SDNQ file", Message("It runs in SD.Next. {0}", _ORIGINAL)),
    (("weight_packed", "weight_global_scale"), "a compressed-tensors file", Message("It runs in vLLM. {0}", _ORIGINAL)),
    (("_data", "_scale"), "an optimum-quanto file", _ORIGINAL),
    (("weight_qdata", "_weight_qdata"), "a torchao file", _ORIGINAL),
    (("float8_data",), "a flux-fp8-api file", _ORIGINAL),
    (("W_q",), "an HQQ file", _ORIGINAL),
    (("qweight", "qzeros"), "a GPTQ or AWQ file", _ORIGINAL),
)
"""Tensor names of other tools' formats, which neither ComfyUI nor this package reads, the tool, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A model file understood: its weights in file order, scales and markers consumed.

    Attributes:
        dialects: the quantization formats of the file, in the order found; none in one that is not quantized.
        notes: what was repaired or assumed while reading, one sentence each.
        undecided: name of a weight -> what the file does not tell of it, and how it was read.
    """

    path: str
    dialects: tuple[str, ...]
    metadata: dict[str, str]
    weights: dict[str, StoredWeight]
    notes: list[str]
    undecided: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What precedes the diffusion model's own names; as in ComfyUI's ``unet_prefix_from_state_dict``."""
        names = list(self.weights)
        inside = (prefix for prefix in MODEL_PREFIXES if any(name.startswith(prefix) for name in names))
        whole = (prefix for prefix in WHOLE_PREFIXES if all(name.startswith(prefix) for name in names))
        return next(inside, None) or next(whole, "")

    @property
    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the diffusion model's weights by its own names."""
        prefix = self.prefix
        return {name.removeprefix(prefix): weight.shape for name, weight in self.weights.items()}

    def refuse_lora(self) -> None:
        """Raise :class:`CheckpointError` for a LoRA, which is no model."""
        name = next((name for name in self.weights if "lora_" in name), None)
        if name is not None:
            raise CheckpointError(self.path, "a LoRA, which is applied in 16 bit", name, "Convert the model instead.")


def dialect_text(dialects: Sequence[str]) -> str:
    """Write the quantization formats of a file for people."""
    return " + ".join(dialects) or "plain"


def read_checkpoint(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None, path) -> Checkpoint:
    """Recognise a file's quantization formats and give every weight its scale. Reads scales and markers only.

    Raises:
        UnconsumedScale: a tensor looks like a quantization scale and belongs to no weight.
        NonFiniteWeight: a scale is NaN, infinite, zero or negative.
        CheckpointError: another tool's format, or a contradiction inside the file.

    Example:
        >>> from halfsafe.precision.formats.checkpoint import read_checkpoint
        >>> from halfsafe.precision.files.safetensors_file import open_checkpoint
        >>> file = open_checkpoint("model.safetensors")
        >>> checkpoint = read_checkpoint(file, file.metadata, "model.safetensors")
        >>> checkpoint.weights["img_in.proj.weight"].storage
        'fp16'
    """
    example = {name.rpartition(".")[2]: name for name in tensors}
    for leaves, tool, advice in _FOREIGN:
        leaf = next((leaf for leaf in leaves if leaf in example), None)
        if leaf is not None:
            raise CheckpointError(path, tool, example[leaf], advice)
    return _Reader(tensors, metadata or {}, path).read()


def lasting_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that stays true of converted weights: without ComfyUI's table of quantized layers and our
    card, both written anew, and hashes of the tensors (``modelspec.hash_sha256``, ``sshs_model_hash``)."""
    return {
        key: value for key, value in metadata.items() if key not in (QUANTIZATION_KEY, CARD_KEY) and "hash" not in key
    }


class _Reader:
    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str], path):
        self.entries = tensors.entries if isinstance(tensors, TensorFile) else {}
        self.zeros = list(map(str, zero_runs(tensors))) if isinstance(tensors, TensorFile) else []
        self.tensors = dict(tensors)
        self.metadata = metadata
        self.path = path
        self.taken: set[str] = set()
        self.dialects: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        self.undecided: dict[str, str] = {}

    def read(self) -> Checkpoint:
        self.settings = self._settings()
        self.full_precision = self._legacy_markers()
        # One by one: each takes its scales, which own nothing then.
        quantized = {
            name: self._weight(name, tensor) for name, tensor in self.tensors.items() if self._is_owner(name, tensor)
        }
        self._check_leftovers(quantized)
        weights = {
            name: replace(quantized[name], file=self._file_of(name))
            if name in quantized
            else StoredWeight(name, tensor, file=self._file_of(name))
            for name, tensor in self.tensors.items()
            if name not in self.taken
        }
        self._check_meanings([weight for weight in weights.values() if weight.data.dtype not in NUMBERS])
        remarks = [*self.remarks.items(), *Counter(self.undecided.values()).items()]
        counted = [Message("{0} tensor: {1}" if n == 1 else "{0} tensors: {1}", n, what) for what, n in remarks]
        notes = [*counted, *self.zeros]
        metadata = lasting_metadata(self.metadata)
        return Checkpoint(str(self.path), tuple(self.dialects), metadata, weights, notes, self.undecided)

    def _file_of(self, name: str) -> str:
        return str(self.entries[name].file if name in self.entries else self.path)

    def _settings(self) -> dict[str, dict]:
        """Map layer names to ComfyUI's per-layer JSON, from ``comfy_quant`` tensors and from the header, which wins."""
        settings = {}
        for name in self.tensors:
            if name.endswith(".comfy_quant"):
                self.taken.add(name)
                layer = name.removesuffix(".comfy_quant")
                text = self.tensors[name].to(torch.uint8).numpy().tobytes()
                if text.strip(b"\0"):
                    settings[layer] = self._json(text, name)
                else:  # of layers that are not quantized (ComfyUI issue 15400), or a damaged one (issue 15567)
                    self.remarks["comfy_quant of zero bytes, which says nothing and which ComfyUI cannot read"] += 1
                if f"{layer}.weight" not in self.tensors:
                    raise CheckpointError(self.path, "describes a weight that is not in the file", name)
        return settings | self._settings_in_header()

    def _settings_in_header(self) -> dict[str, dict]:
        """Map the layers of the file to what the header says of them, by their names with or without a prefix.

        ComfyUI's Load Diffusion Model reads the header before and after it strips the prefix, so that the name without
        wins (``load_diffusion_model_state_dict`` in comfy/sd.py, ``convert_old_quants`` in comfy/utils.py).
        """
        if QUANTIZATION_KEY not in self.metadata:
            return {}
        layers = self._json(self.metadata[QUANTIZATION_KEY], QUANTIZATION_KEY).get("layers")
        if not isinstance(layers, dict) or not all(isinstance(value, dict) for value in layers.values()):
            raise CheckpointError(self.path, Message("its {0} holds no table of layers", QUANTIZATION_KEY))
        names = [(f"{start}{layer}", layer) for start in MAY_PRECEDE for layer in layers]
        found = {name: layer for name, layer in names if f"{name}.weight" in self.tensors}
        if absent := len(layers.keys() - found.values()):
            self.remarks[Message("named in {0}, but not in the file", QUANTIZATION_KEY)] += absent
        return {name: layers[layer] for name, layer in found.items()}

    def _json(self, text: str | bytes, where: str) -> dict:
        try:
            return read_object(text)
        except ValueError as error:
            raise CheckpointError(self.path, str(error), where) from None

    def _legacy_markers(self) -> dict[str, bool]:
        """Map the prefix of each ``scaled_fp8`` marker to whether it asks for full precision (two elements)."""
        markers = {}
        for name, tensor in self.tensors.items():
            if name == "scaled_fp8" or name.endswith(".scaled_fp8"):
                self.taken.add(name)
                self.dialects[SCALED_FP8] += 1
                markers[name.removesuffix(SCALED_FP8)] = tensor.numel() == 2
        return markers

    def _is_owner(self, name: str, tensor: torch.Tensor) -> bool:
        if name in self.taken:
            return False
        layer = _layer(name)
        if layer is not None and (layer in self.settings or f"{layer}.scale_weight" in self.tensors):
            return True
        if tensor.dtype == torch.int8:
            return any(key in self.tensors for key, _ in _weight_scale_names(name))
        return tensor.dtype in FP8_DTYPES and not looks_like_scale(name)

    def _weight(self, name: str, data: torch.Tensor) -> StoredWeight:
        layer = _layer(name)
        settings = self.settings.get(layer) if layer else None
        if settings is not None:
            self.dialects[COMFY_QUANT if f"{layer}.comfy_quant" in self.tensors else QUANTIZATION_KEY] += 1
            declared = self._format(name, data, settings)
            if data.dtype not in FP8_DTYPES or not declared.startswith("float8_") or "num_experts" in settings:
                return self._in_format(name, data, settings | {"format": declared})
        scale, granularity, dialect = self._weight_scale(name, data)
        if settings is None and data.dtype in EIGHT_BIT:
            self.dialects[dialect] += 1
            if what := _undecided(data, scale, granularity):
                self.undecided[name] = what
        settings = settings or {}
        if dialect == SCALED_FP8:
            prefix = max((prefix for prefix in self.full_precision if name.startswith(prefix)), key=len, default="")
            if self.full_precision.get(prefix):
                settings = {"format": E4M3.name} | settings | {FULL_PRECISION: True}
        return StoredWeight(name, data, scale, granularity, self._input_scale(layer), settings=settings)

    def _format(self, name: str, data: torch.Tensor, settings: dict) -> str:
        """Return the format that ``comfy_quant`` declares."""
        declared = settings.get("format")
        # Some files name none (ComfyUI issues 14722, 15400): their data show it.
        if declared is None and (shown := self._format_shown(_layer(name), data)):
            self.remarks[Message("comfy_quant without a format, read as {0}; ComfyUI refuses it", shown)] += 1
            if data.dtype == torch.int8 and "convrot" not in settings and rotation_group(data.shape[-1]):
                self.undecided[name] = ROTATED_OR_NOT
            return shown
        if not isinstance(declared, str):
            raise CheckpointError(self.path, "its comfy_quant names no format", name)
        fp8 = declared.startswith("float8_") and data.dtype in FP8_DTYPES and "num_experts" not in settings
        if declared not in FORMATS and not fp8:
            advice = "Update ComfyUI and Halfsafe, or use another version of the model."
            unknown = Message("which neither ComfyUI up to {0} nor Halfsafe can read", READS_UP_TO)
            problem = Message("in the format {0}, {1}", f"{declared[:80]!r}", unknown)
            raise CheckpointError(self.path, problem, name, advice)
        if fp8 and not declared.startswith(str(data.dtype).removeprefix("torch.")):
            self.remarks[Message("declared as {0}, stored and read as {1}", declared, name_of(data.dtype))] += 1
        return declared

    def _format_shown(self, layer: str | None, data: torch.Tensor) -> str:
        """Return the format that data and scales of a layer have alone among ComfyUI's; "" where none has."""
        scale = self.tensors.get(f"{layer}.weight_scale")
        if scale is None:
            return ""
        if data.dtype in FP8_DTYPES and scale.numel() == 1:
            return str(data.dtype).removeprefix("torch.")
        packed = "nvfp4" if data.dtype == torch.uint8 and f"{layer}.weight_scale_2" in self.tensors else ""
        return "int8_tensorwise" if data.dtype == torch.int8 else packed

    def _in_format(self, name: str, data: torch.Tensor, settings: dict) -> StoredWeight:
        layer = _layer(name)
        declared = settings["format"]
        found = {leaf: f"{layer}.{leaf}" for leaf in FORMATS[declared].leaves if f"{layer}.{leaf}" in self.tensors}
        tensors = {leaf: self.tensors[key] for leaf, key in found.items()}
        self.taken.update(found.values())
        try:
            bias = self.tensors.get(f"{layer}.bias")
            return weight_in_format(name, data, tensors, settings, None if bias is None else bias.numel())
        except NonFiniteScale as error:
            key = found[error.leaf]
            raise NonFiniteWeight(self._file_of(key), str(error), key, _DAMAGED) from None
        except ValueError as error:
            problem = Message("{0}, but {1}", declared, error)
            raise CheckpointError(self._file_of(name), problem, name, _DAMAGED) from None

    def _weight_scale(self, name: str, data: torch.Tensor) -> tuple[torch.Tensor | None, str, str]:
        found = next(((key, dialect) for key, dialect in _weight_scale_names(name) if key in self.tensors), None)
        if found is None:
            return None, "none", "unscaled fp8"
        key, dialect = found
        scale = self._scale(key)
        if dialect == SCALED_FP8 and f"{key}_tensor" in self.tensors:
            scale = scale * self._scale(f"{key}_tensor")
        if data.dtype not in EIGHT_BIT:
            if scale.numel() > 1 or data.dtype not in NUMBERS:
                one, many = "a scale next to a weight in {0}", "a scale of many values next to a weight in {0}"
                problem = Message(many if scale.numel() > 1 else one, name_of(data.dtype))
                raise UnconsumedScale(self.path, problem, key)
            if scale.item() == 1:
                return None, "none", dialect
            self.remarks["16-bit weights with a scale_weight: the scale was applied"] += 1
        granularity = granularity_of(scale, data.shape)
        if granularity is None:
            shapes = Message("{0} does not fit a weight of shape {1}", tuple(scale.shape), tuple(data.shape))
            problem = Message("a scale of shape {0}", shapes)
            raise UnconsumedScale(self.path, problem, key, "Report it to the tool's authors.")
        if dialect == SCALED_FP8 and data.dtype == torch.float8_e5m2:
            self.remarks["e5m2 under a scaled_fp8 marker, which ComfyUI reads as e4m3fn; read as e5m2"] += 1
        shape = {"tensor": (), "row": (-1, 1), "block": scale.shape[:2]}[granularity]
        return scale.reshape(shape), granularity, dialect

    def _input_scale(self, layer: str | None) -> torch.Tensor | None:
        key = next((f"{layer}.{leaf}" for leaf in _INPUT_SCALES if f"{layer}.{leaf}" in self.tensors), None)
        if key is None:
            return None
        scale = self._scale(key)
        if scale.numel() > 1:
            self.remarks["input scales with several values, which ComfyUI does not support, were ignored"] += 1
            return None
        is_default = key.endswith(".scale_input") and scale.item() == 1
        return None if is_default else scale.reshape(())

    def _scale(self, key: str) -> torch.Tensor:
        tensor = self.tensors[key]
        self.taken.add(key)
        if tensor.dtype == torch.uint8 and hasattr(torch, "float8_e8m0fnu"):
            tensor = tensor.view(torch.float8_e8m0fnu)
        if tensor.numel() == 0:
            raise CheckpointError(self._file_of(key), "an empty scale", key)
        if tensor.is_complex():
            raise NonFiniteWeight(self._file_of(key), "a scale of complex numbers", key, _DAMAGED)
        scale = tensor.float()
        lowest, largest = (bound.item() for bound in torch.aminmax(scale))
        if not (math.isfinite(lowest) and math.isfinite(largest)):
            raise NonFiniteWeight(self._file_of(key), "a scale that is NaN or infinite", key, _DAMAGED)
        if lowest <= 0:
            raise NonFiniteWeight(self._file_of(key), Message("a scale of {0}", f"{lowest:g}"), key, _DAMAGED)
        return scale

    def _check_meanings(self, weights: Iterable[StoredWeight]) -> None:
        """Raise CheckpointError for whole numbers and the like that stand for a model's numbers in an unknown way."""
        for weight in weights:
            if weight.plain and _is_parameter(weight):
                problem = Message("in {0}, and nothing in the file says what numbers those stand for", weight.storage)
                advice = "Get the file with its quantization settings (comfy_quant), or its 16-bit version."
                raise CheckpointError(self._file_of(weight.name), problem, weight.name, advice)

    def _check_leftovers(self, quantized: dict[str, StoredWeight]) -> None:
        for name in self.tensors:
            is_part = looks_like_scale(name) or name.rpartition(".")[2] in _PARTS
            if name not in self.taken and name not in quantized and is_part:
                self._check_leftover(name, quantized)

    def _check_leftover(self, name: str, quantized: dict[str, StoredWeight]) -> None:
        layer, _, leaf = name.rpartition(".")
        weight = self.tensors.get(f"{layer}.weight")
        if leaf in _CACHE_SCALES and self.tensors[name].numel() == 1 and quantized:
            self.taken.add(name)
            self.remarks["attention cache and output scales, which ComfyUI does not use, were ignored"] += 1
        elif leaf in _INPUT_SCALES and weight is not None and weight.dtype not in EIGHT_BIT:
            self.taken.add(name)
            self.remarks["input scales of layers that are not quantized were ignored"] += 1
        elif (weight is not None and weight.dtype in EIGHT_BIT | {torch.uint8}) or (
            leaf in _WEIGHT_SCALES and (weight is None or f"{layer}.weight" in quantized)
        ):
            problem = "looks like a quantization scale, but no readable weight uses it"
            advice = "Without the scale it would give noise. ComfyUI can load this model from a comfy_quant file."
            raise UnconsumedScale(self.path, problem, name, advice)
        elif leaf in _WEIGHT_SCALES:
            self.remarks["named like weight scales, next to weights that are not quantized; kept unchanged"] += 1


def _is_parameter(weight: StoredWeight) -> bool:
    """True if, by name, dtype and dimensions, a tensor holds parameters, and not positions, masks or a text."""
    is_matrix = weight.data.dim() > 1 and weight.data.dtype not in (torch.int64, torch.bool)
    return bool(_PARAMETER.search(weight.name)) or (is_matrix and not _POSITIONS.search(weight.name))


def _undecided(data: torch.Tensor, scale: torch.Tensor | None, granularity: str) -> str:
    """Return how unmarked 8-bit data are ambiguous: other tools write the same tensors with another meaning."""
    if data.dtype == torch.int8 and granularity in ("tensor", "row") and rotation_group(data.shape[-1]):
        return ROTATED_OR_NOT
    if scale is not None and granularity == "block" and block_sizes(data.shape, scale.shape) == (1, MX_BLOCK):
        return TILED_OR_NOT
    return ""


def _layer(name: str) -> str | None:
    return name.removesuffix(".weight") if name.endswith(".weight") else None


def _weight_scale_names(name: str) -> list[tuple[str, str]]:
    """List the names of a weight's scale in each dialect, with the dialect."""
    names = [(f"{name}_scale", "weight_scale"), (f"{name}_scale_inv", "weight_scale_inv")]
    layer = _layer(name)
    return names if layer is None else [*names, (f"{layer}.scale_weight", SCALED_FP8), (f"{layer}.scale", "scale")]


def looks_like_scale(name: str) -> bool:
    """True if a tensor is named as quantization scales are: a last part with the word scale or scales in it."""
    return _SCALE_LEAF.search(name.rpartition(".")[2]) is not None
