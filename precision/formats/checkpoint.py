"""Every way a model file stores quantized weights, read into one shape.

Sources: ComfyUI ``comfy/ops.py`` (``comfy_quant``), ``comfy/utils.py`` (``scaled_fp8``,
``_quantization_metadata``); NVIDIA ModelOpt and vLLM (``weight_scale``, ``input_scale``,
``k_scale``); DeepSeek-V3 ``inference/kernel.py`` (``weight_scale_inv``, which despite its name
multiplies) and ``inference/convert.py`` (the same as ``scale``); musubi-tuner
``modules/fp8_optimization_utils.py`` (``scale_weight`` of three dimensions,
``scale_weight_tensor``)."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base.amax import floats
from ..base.dtypes import FP8_DTYPES, name_of
from ..base.errors import CheckpointError, NonFiniteWeight
from ..base.message import Message, joined
from ..files.safetensors_file import open_checkpoint
from ..files.safetensors_header import QUANTIZATION_KEY, contradiction, read_object
from ..files.tensor_file import TensorFile
from ..files.zeros import zero_places, zero_runs
from .format import Format, Tensors
from .fp8 import E4M3
from .int8 import rotation_group
from .plain import BLOCK_SCALES, EIGHT_BIT, NUMBERS, PLAIN, block_sizes, scaled_format
from .registry import FORMATS, weight_in_format
from .stored_weight import FULL_PRECISION, NonFiniteScale, StoredWeight

COMFY_QUANT = "comfy_quant"
SCALED_FP8 = "scaled_fp8"
UNSCALED = "unscaled fp8"
WITHOUT_SCALES = "fp8 without its scales"
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
SCALES_ELSEWHERE = (
    "fp8 weights were scaled, and the scales are not in the file (each magnitude is that of a weight divided by a "
    "scale); they are read without, which gives noise: get the file with its scales, or the 16-bit version"
)
JOINED = "settings were taken from comfy_quant where the header's table says nothing; ComfyUI reads the table alone"
MX_BLOCK = 32
LARGE = 0.95
SCALED = 8.0
"""Magnitude below which most numbers of a weight lie, and above which some of a weight divided by a
scale do.

A scale brings the largest number of a matrix, row or block to 448 (e4m3fn) or 57344 (e5m2): one in
20 numbers of a normal weight is then above 200, and above 8 where the largest is 50 times that. In
weights themselves one in 20 is above 0.02 to 0.4, and above 2 where layers are normalized to unit
variance. """
FEWEST_MATRICES = 4
SAMPLED_MATRICES = 64
SAMPLED_PLACES = 4
SAMPLED_BYTES = 1024
_DAMAGED = "The file is damaged: download it again."
_ITS_NODES = "Load it with the nodes that its publisher names, or use another version of the model."
_ANOTHER = "Use another version of the model, and tell the authors of the tool that wrote this one."
_IN_INT8 = ("int8_blockwise", "int8_lodewise", "int8_tensorwise")
"""Formats of int8 numbers and scales, which the shape of the scales tells apart: ComfyUI's, and
those of silveroxides/convert_to_quant (``comfy/quant_ops.py``), which some of its versions wrote
for one another."""
_LIKE = {"hybrid_mxfp8": ("mxfp8", "weight_scalar")}
"""A format of convert_to_quant -> ComfyUI's format with the same numbers, and the tensor that is
added for GPUs without products in it (``formats/hybrid_mxfp8_conversion.py``)."""
_CHANGES_NUMBERS = ("format", "convrot", "convrot_groupsize", "group_size", "num_experts")
_SCALE_LEAF = re.compile(r"(^|_)scales?(_|$)")
_PARAMETER = re.compile(r"(weight|bias)$")
_POSITIONS = re.compile(r"(ids|index|mask)$")
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "weight_scale_2", "scale_input")
_PARTS = frozenset(leaf for format in FORMATS.values() for leaf in format.leaves)
_INPUT_SCALES = ("input_scale", "scale_input")
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "prob_output_scale", "output_scale")

_ORIGINAL = "Use the 16-bit or fp8 version of this model."
_FOREIGN = (
    (("wscales", "smooth_factor"), "a Nunchaku (SVDQuant) file", "Load it with the ComfyUI-nunchaku nodes."),
    (("absmax", "bitsandbytes__nf4", "SCB"), "a bitsandbytes file", "Load it with a bitsandbytes loader node."),
    (("svd_up", "svd_down", "zero_point"), "an SDNQ file", joined(["It runs in SD.Next.", _ORIGINAL])),
    (("weight_packed", "weight_global_scale"), "a compressed-tensors file", joined(["It runs in vLLM.", _ORIGINAL])),
    (("_data", "_scale"), "an optimum-quanto file", _ORIGINAL),
    (("weight_qdata", "_weight_qdata"), "a torchao file", _ORIGINAL),
    (("float8_data",), "a flux-fp8-api file", _ORIGINAL),
    (("W_q",), "an HQQ file", _ORIGINAL),
    (("qweight", "qzeros"), "a GPTQ or AWQ file", _ORIGINAL),
)
"""Tensor names of other tools' formats, which neither ComfyUI nor this package reads, the tool, and
what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A model file understood: its weights in file order, scales and markers consumed.

    Attributes:
        dialects: the quantization formats of the file, in the order found; none in one that is not quantized.
        notes: what was repaired or assumed while reading, one sentence each.
        undecided: name of a weight -> what the file does not tell of it, and how it was read.
        unpacked: weights that are quantized in the file and were unpacked to bf16 after it was read, by their names.
    """

    path: str
    dialects: tuple[str, ...]
    metadata: dict[str, str]
    weights: Mapping[str, StoredWeight]
    notes: list[str]
    undecided: Mapping[str, str] = field(default_factory=dict)
    unpacked: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """What precedes the diffusion model's own names; as in ComfyUI's
        ``unet_prefix_from_state_dict``."""
        names = list(self.weights)
        inside = (prefix for prefix in MODEL_PREFIXES if any(name.startswith(prefix) for name in names))
        whole = (prefix for prefix in WHOLE_PREFIXES if all(name.startswith(prefix) for name in names))
        return next(inside, None) or next(whole, "")

    @property
    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the diffusion model's weights by its own names."""
        prefix = self.prefix
        return {name.removeprefix(prefix): weight.shape for name, weight in self.weights.items()}

    def zero_notes(self, places: Mapping[str, Iterable[int]] | None = None) -> list[str]:
        """Return a note for each run of zero bytes around ``places`` that the checkpoint has none for.

        ``places``: file -> bytes at which zeros follow; None to search the data of all weights.
        """
        places = _zeros_in(self.weights.values()) if places is None else places
        if not any(places.values()):
            return []
        notes = map(str, zero_runs(open_checkpoint(self.path), places))
        return [note for note in notes if note not in self.notes]


def _zeros_in(weights: Iterable[StoredWeight]) -> dict[str, list[int]]:
    """Read the data of weights, and map their files to the bytes at which zeros follow, for
    :meth:`Checkpoint.zero_notes`."""
    places: dict[str, list[int]] = defaultdict(list)
    for weight in weights:
        if weight.start:
            places[weight.file] += zero_places(weight.data, weight.start)
    return places


def dialect_text(dialects: Sequence[str]) -> str:
    """Write the quantization formats of a file for people."""
    return " + ".join(dialects) or "plain"


def read_checkpoint(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None, path) -> Checkpoint:
    """Recognise a file's quantization formats and give every weight its scale. Reads scales and
    markers only.

    Raises:
        NonFiniteWeight: a scale is NaN, infinite, zero or negative.
        CheckpointError: another tool's format, a contradiction inside the file, or a tensor that
            looks like a quantization scale and belongs to no weight.

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
    """Return the metadata that stays true of converted weights: without ComfyUI's table of
    quantized layers and our card, both written anew, and hashes of the tensors
    (``modelspec.hash_sha256``, ``sshs_model_hash``)."""
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
        self._tell_missing_scales([weight for weight in quantized.values() if _is_bare(weight)])
        weights = {
            name: replace(quantized[name], **self._place_of(name))
            if name in quantized
            else StoredWeight(name, tensor, **self._place_of(name))
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

    def _place_of(self, name: str) -> dict[str, Any]:
        entry = self.entries.get(name)
        return {"file": str(self.path)} if entry is None else {"file": str(entry.file), "start": entry.start}

    def _settings(self) -> dict[str, dict]:
        """Map layer names to ComfyUI's per-layer JSON, of ``comfy_quant`` tensors joined with the
        header's table."""
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
        for layer, stated in self._settings_in_header().items():
            settings[layer] = self._joined(layer, settings.get(layer, {}), stated) if layer in settings else stated
        return settings

    def _joined(self, layer: str, marked: dict, stated: dict) -> dict:
        """Join what ``comfy_quant`` and the header's table say of a layer; the table wins, as in
        ComfyUI."""
        marked, stated = _flat(marked), _flat(stated)
        if key := contradiction(marked, stated):
            said = Message("{0} is {1} in comfy_quant and {2}", key, json.dumps(marked[key]), json.dumps(stated[key]))
            self.undecided[f"{layer}.weight"] = Message(
                "{0} in the header's table, which is read, as ComfyUI does: if the result is noise, get the file from "
                "the model's publisher",
                said,
            )
        elif any(key in marked and key not in stated for key in _CHANGES_NUMBERS):
            self.remarks[JOINED] += 1
        return marked | stated

    def _settings_in_header(self) -> dict[str, dict]:
        """Map the layers of the file to what the header says of them, by their names with or
        without a prefix.

        ComfyUI's Load Diffusion Model reads the header before and after it strips the prefix, so
        that the name without wins (``load_diffusion_model_state_dict`` in comfy/sd.py,
        ``convert_old_quants`` in comfy/utils.py)."""
        if QUANTIZATION_KEY not in self.metadata:
            return {}
        layers = self._json(self.metadata[QUANTIZATION_KEY], QUANTIZATION_KEY).get("layers")
        if not isinstance(layers, dict) or not all(isinstance(value, dict) for value in layers.values()):
            raise CheckpointError(self.path, Message("its {0} holds no table of layers", QUANTIZATION_KEY))
        names = [(f"{start}{layer}", layer) for start in MAY_PRECEDE for layer in layers]
        found: dict[str, str] = {}
        for name, layer in names:
            if f"{name}.weight" not in self.tensors:
                continue
            before = found.get(name, layer)
            one, other = _flat(layers[before]), _flat(layers[layer])
            if key := contradiction(one, other):
                two = (before, json.dumps(one[key]), layer, json.dumps(other[key]))
                told = Message("{0} of {1} is {2} in the header's table, and of {3} {4}: the last is read", key, *two)
                self.undecided[f"{name}.weight"] = told
            found[name] = layer
        if absent := len(layers.keys() - found.values()):
            self.remarks[Message("named in {0}, but not in the file", QUANTIZATION_KEY)] += absent
        return {name: layers[layer] for name, layer in found.items()}

    def _json(self, text: str | bytes, where: str) -> dict:
        try:
            return read_object(text)
        except ValueError as error:
            raise CheckpointError(self.path, str(error), where) from None

    def _legacy_markers(self) -> dict[str, bool]:
        """Map the prefix of each ``scaled_fp8`` marker to whether it asks for full precision (two
        elements)."""
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
            settings = settings | {"format": self._format(name, data, settings)}
            if not self._is_plain(name, data, settings):
                return self._in_format(name, data, settings)
        format, tensors, dialect = self._scaled(name, data, _flat(settings or {}).get("group_size"))
        weight = StoredWeight(name, data, format, tensors, self._input_scale(layer))
        if settings is None and data.dtype in EIGHT_BIT:
            self.dialects[dialect] += 1
            if what := _undecided(weight):
                self.undecided[name] = what
        settings = settings or {}
        if dialect == SCALED_FP8:
            prefix = max((prefix for prefix in self.full_precision if name.startswith(prefix)), key=len, default="")
            if self.full_precision.get(prefix):
                settings = {"format": E4M3.name} | settings | {FULL_PRECISION: True}
        return replace(weight, settings=settings)

    def _is_plain(self, name: str, data: torch.Tensor, settings: dict) -> bool:
        """True for numbers and scales that no format of ComfyUI has: fp8, and int8 that is no
        matrix or has a scale for each block.

        Raises:
            CheckpointError: such numbers are rotated, in a way that the file does not tell.
        """
        if "num_experts" in settings:
            return False
        if data.dtype in FP8_DTYPES:
            return settings["format"].startswith("float8_")
        scale = self.tensors.get(f"{_layer(name)}.weight_scale")
        if data.dtype != torch.int8 or settings["format"] not in _IN_INT8 or scale is None:
            return False
        found = scaled_format(scale, data.shape, _flat(settings).get("group_size"))
        if data.dim() == 2 and found is not BLOCK_SCALES:
            return False
        if _flat(settings).get("convrot"):
            problem = Message("in int8 of shape {0} with scales of shape {1}", tuple(data.shape), tuple(scale.shape))
            problem = Message("{0} and a convrot, which is known for matrices with scales of rows alone", problem)
            raise CheckpointError(self._file_of(name), problem, name, _ANOTHER)
        return True

    def _format(self, name: str, data: torch.Tensor, settings: dict) -> str:
        """Return the format that ``comfy_quant`` declares, by the name that it has in ComfyUI."""
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
        if declared in _LIKE:
            same, unused = _LIKE[declared]
            self.taken.add(f"{_layer(name)}.{unused}")
            self.remarks[Message("{0}, read as {1}; its {2} is not used", declared, same, unused)] += 1
            return same
        if declared in _IN_INT8 and declared not in FORMATS:
            self.remarks[Message("{0}, read by the shape of its scales; ComfyUI refuses it", declared)] += 1
            return "int8_tensorwise"
        if declared not in FORMATS and not fp8:
            unknown = Message("which neither ComfyUI up to {0} nor Halfsafe reads", READS_UP_TO)
            problem = Message("in the format {0}, {1}", f"{declared[:80]!r}", unknown)
            raise CheckpointError(self.path, problem, name, _ITS_NODES)
        if fp8 and not declared.startswith(str(data.dtype).removeprefix("torch.")):
            self.remarks[Message("declared as {0}, stored and read as {1}", declared, name_of(data.dtype))] += 1
        return declared

    def _format_shown(self, layer: str | None, data: torch.Tensor) -> str:
        """Return the format that data and scales of a layer have alone among ComfyUI's; "" where
        none has."""
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
            # No damage changes a shape or a setting and leaves the header's JSON readable.
            problem = Message("{0}, but {1}", declared, error)
            raise CheckpointError(self._file_of(name), problem, name, _ANOTHER) from None

    def _scaled(self, name: str, data: torch.Tensor, block: object = None) -> tuple[Format, Tensors, str]:
        """Return the format of numbers with the scale that the file has for them, the scale, and
        its dialect."""
        found = next(((key, dialect) for key, dialect in _weight_scale_names(name) if key in self.tensors), None)
        if found is None:
            return PLAIN, {}, UNSCALED
        key, dialect = found
        scale = self._scale(key)
        if dialect == SCALED_FP8 and f"{key}_tensor" in self.tensors:
            scale = scale * self._scale(f"{key}_tensor")
        if data.dtype not in EIGHT_BIT:
            if scale.numel() > 1 or data.dtype not in NUMBERS:
                one, many = "a scale next to a weight in {0}", "a scale of many values next to a weight in {0}"
                problem = Message(many if scale.numel() > 1 else one, name_of(data.dtype))
                raise CheckpointError(self.path, problem, key)
            if scale.item() == 1:
                return PLAIN, {}, dialect
            self.remarks["16-bit weights with a scale_weight: the scale was applied"] += 1
        format = scaled_format(scale, data.shape, block)
        if format is None:
            shapes = Message("{0} does not fit a weight of shape {1}", tuple(scale.shape), tuple(data.shape))
            problem = Message("a scale of shape {0}", shapes)
            raise CheckpointError(self.path, problem, key, "Report it to the tool's authors.")
        if dialect == SCALED_FP8 and data.dtype == torch.float8_e5m2:
            self.remarks["e5m2 under a scaled_fp8 marker, which ComfyUI reads as e4m3fn; read as e5m2"] += 1
        return format, {"weight_scale": format.as_read(scale)}, dialect

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

    def _tell_missing_scales(self, bare: Sequence[StoredWeight]) -> None:
        """Tell of fp8 matrices without a scale if most of a sample are as large as after a division
        by one.

        A scale leaves one number at the largest code, which a sample does not find in a matrix of
        millions: the larger of a few thousand numbers tell it too, and of scales that are rounded
        up to a power of two as well."""
        sample = bare[:: -(-len(bare) // SAMPLED_MATRICES) or 1]
        sizes = [_large_number(weight.data) for weight in sample]
        scaled = sum(size > SCALED for size in sizes)
        if scaled >= FEWEST_MATRICES and 2 * scaled > sum(size > 0 for size in sizes):
            self.dialects[WITHOUT_SCALES] = self.dialects.pop(UNSCALED, 0)
            self.undecided |= {weight.name: SCALES_ELSEWHERE for weight in bare}

    def _check_meanings(self, weights: Iterable[StoredWeight]) -> None:
        """Raise CheckpointError for whole numbers and the like that stand for a model's numbers in
        an unknown way."""
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
        elif leaf in _INPUT_SCALES and f"{layer}.weight" in quantized:
            self.taken.add(name)
            self.remarks["input scales of layers whose inputs have a scale for each token were ignored"] += 1
        elif (weight is not None and weight.dtype in EIGHT_BIT | {torch.uint8}) or (
            leaf in _WEIGHT_SCALES and (weight is None or f"{layer}.weight" in quantized)
        ):
            if f"{layer}.weight" in quantized and leaf in _PARTS:
                own = quantized[f"{layer}.weight"].storage
                beside = Message("beside a weight in {0}, which has no such tensor", own)
                problem = Message("{0}: ComfyUI leaves it out, and the result is wrong", beside)
                raise CheckpointError(self._file_of(name), problem, name, _ANOTHER)
            unknown = "looks like a quantization scale, but no readable weight uses it"
            marked = "ComfyUI can load this model from a comfy_quant file."
            advice = joined(["Without the scale it would give noise.", _ANOTHER if self.settings else marked])
            raise CheckpointError(self.path, unknown, name, advice)
        elif leaf in _WEIGHT_SCALES:
            self.remarks["named like weight scales, next to weights that are not quantized; kept unchanged"] += 1


def _flat(settings: dict) -> dict:
    """Return the settings of a layer with those under ``params``, which ComfyUI reads where the top
    has none."""
    params = settings.get("params")
    return {**params, **{k: v for k, v in settings.items() if k != "params"}} if isinstance(params, dict) else settings


def _is_bare(weight: StoredWeight) -> bool:
    """True for an fp8 matrix without a scale, or with one of 1, which a conversion of such a matrix
    writes."""
    scale = weight.format.one_scale(weight)
    return weight.data.dtype in FP8_DTYPES and weight.data.dim() > 1 and scale is not None and scale.item() == 1


def _large_number(data: torch.Tensor) -> float:
    """Return the 95th percentile of the magnitudes other than zero of fp8 data, sampled in places
    spread over the data; 0 if all are zero."""
    codes = data.reshape(-1)
    step = max(1, len(codes) // SAMPLED_PLACES)
    places = [codes[start : start + SAMPLED_BYTES] for start in range(0, len(codes), step)]
    values = torch.cat([floats(place) for place in places]).abs()
    values = values[values > 0]
    return values.quantile(LARGE).item() if len(values) else 0.0


def _is_parameter(weight: StoredWeight) -> bool:
    """True if, by name, dtype and dimensions, a tensor holds parameters, and not positions, masks
    or a text."""
    is_matrix = weight.data.dim() > 1 and weight.data.dtype not in (torch.int64, torch.bool)
    return bool(_PARAMETER.search(weight.name)) or (is_matrix and not _POSITIONS.search(weight.name))


def _undecided(weight: StoredWeight) -> str:
    """Return how unmarked 8-bit data are ambiguous: other tools write the same tensors with another
    meaning."""
    if weight.format is BLOCK_SCALES:
        counts = weight.tensors["weight_scale"].shape
        return TILED_OR_NOT if block_sizes(weight.shape, counts) == (1, MX_BLOCK) else ""
    rotated = weight.data.dtype == torch.int8 and not weight.plain and rotation_group(weight.shape[-1])
    return ROTATED_OR_NOT if rotated else ""


def _layer(name: str) -> str | None:
    return name.removesuffix(".weight") if name.endswith(".weight") else None


def _weight_scale_names(name: str) -> list[tuple[str, str]]:
    """List the names of a weight's scale in each dialect, with the dialect."""
    names = [(f"{name}_scale", "weight_scale"), (f"{name}_scale_inv", "weight_scale_inv")]
    layer = _layer(name)
    return names if layer is None else [*names, (f"{layer}.scale_weight", SCALED_FP8), (f"{layer}.scale", "scale")]


def looks_like_scale(name: str) -> bool:
    """True if a tensor is named as quantization scales are: a last part with the word scale or
    scales in it."""
    return _SCALE_LEAF.search(name.rpartition(".")[2]) is not None
