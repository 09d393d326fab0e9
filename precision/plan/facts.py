"""Facts of a model that a plan depends on: layers, size, the dtypes it is safe in, and its file."""

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ..base.modes import FP8
from ..formats.checkpoint import Checkpoint, StoredWeight

# Last parts of the names of lookup tables in comfy/ldm, comfy/text_encoders and comfy/clip_model.py, which have no
# bias, ...
_TABLE = re.compile(
    r"emb|token|^(shared|relative_attention_bias|reference_points|wte|wpe|codebook|trainable_cond_mask)$"
)
# ... and modules whose own ``weight`` is a plain 2-D parameter: Fourier features (Stable Audio), the motion encoder of
# Wan Animate, and the gates and routers of experts (HiDream, Hunyuan3D, gpt-oss), which have one row for each of few
# experts where a gate of Krea 2 is a linear layer.
_BARE = re.compile(r"(^|\.)(timestep_features|motion_encoder\.enc\.fc\.\d+|motion_encoder\.dec\.direction)$")
_ROUTER = re.compile(r"(^|\.)(gate|router)$")
INPUTS_PER_EXPERT = 8
NO_FILE = Checkpoint("", (), {}, {}, [])


class LayerSpec(NamedTuple):
    """A module with a weight: its name inside the model, its class and its weight's shape."""

    name: str
    cls: str
    shape: tuple[int, ...]

    @property
    def multiplies(self) -> bool:
        """True for a matmul or a convolution."""
        return multiplies(self.cls) and len(self.shape) > 1


def multiplies(cls: str) -> bool:
    """True if a layer with this class name is a matmul or a convolution."""
    return "Linear" in cls or "Conv" in cls


@dataclass(frozen=True)
class ModelFacts:
    """Everything a plan needs to know of a model.

    Attributes:
        file_dtype: the storage of most weights.
        supported: the compute dtypes that the model works in, best first.
        native_fp8: the layers that ComfyUI itself multiplies in fp8 if the device can: the file has their weights in
            fp8 with a scale, and does not request full precision.
        checkpoint: the file; without weights for a model in memory.
        prefix: of the model's tensors in the file.
        names: tensor name in the file -> layer of the model, for each ``.weight``.
        complete: the file has a tensor for each parameter.
    """

    layers: Sequence[LayerSpec]
    parameters: int
    file_dtype: str
    supported: tuple[str, ...]
    native_fp8: Container[str] = frozenset()
    checkpoint: Checkpoint = NO_FILE
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False

    @property
    def inside(self) -> dict[str, StoredWeight]:
        """The tensors of the model, by their names in the file."""
        weights = self.checkpoint.weights.items()
        return {name: weight for name, weight in weights if name.startswith(self.prefix)}


def facts_of(
    checkpoint: Checkpoint,
    prefix: str,
    layers: Sequence[LayerSpec],
    supported: Sequence[str],
    names: Mapping[str, str],
    complete: bool = False,
) -> ModelFacts:
    """Collect the facts of the model below ``prefix`` of a file, with the arguments of
    :class:`ModelFacts`."""
    inside = [weight for name, weight in checkpoint.weights.items() if name.startswith(prefix)]
    parameters = sum(prod(weight.shape) for weight in inside)
    dtype = file_dtype(checkpoint, prefix)
    scaled = (weight for weight in inside if weight.format.multiplies_in(weight) is FP8)
    by_layer = {names.get(weight.name) or weight.layer[len(prefix) :]: weight for weight in scaled}
    native = frozenset(layer for layer, weight in by_layer.items() if not weight.full_precision)
    layers = tuple(layers)
    supported = tuple(supported)
    return ModelFacts(layers, parameters, dtype, supported, native, checkpoint, prefix, names, complete)


def layer_specs(checkpoint: Checkpoint, prefix: str = "") -> list[LayerSpec]:
    """Infer the layers below ``prefix`` of a file: their classes follow from name and shape."""
    layers = []
    for name, weight in checkpoint.weights.items():
        inside = name[len(prefix) :]
        if name.startswith(prefix) and inside.endswith(".weight"):
            layer = inside.removesuffix(".weight")
            has_bias = f"{prefix}{layer}.bias" in checkpoint.weights
            layers.append(LayerSpec(layer, _inferred_class(layer, weight, has_bias), weight.shape))
    return layers


def _inferred_class(name: str, weight: StoredWeight, has_bias: bool) -> str:
    dimensions = len(weight.shape)
    if dimensions != 2:
        return f"Conv{dimensions - 2}d" if 3 <= dimensions <= 5 else "Norm"
    if _BARE.search(name) or (_ROUTER.search(name) and INPUTS_PER_EXPERT * weight.shape[0] <= weight.shape[1]):
        return "Parameter"
    return "Embedding" if not has_bias and _TABLE.search(name.rsplit(".", 1)[-1]) else "Linear"


def file_dtype(checkpoint: Checkpoint, prefix: str = "") -> str:
    """Return the storage of most values of the weights below ``prefix``; ``none`` without
    weights."""
    sizes: Counter[str] = Counter()
    for name, weight in checkpoint.weights.items():
        if name.startswith(prefix):
            sizes[weight.format.counted_as or weight.storage] += prod(weight.shape)
    return most(sizes)


def most(sizes: Mapping[str, int]) -> str:
    """Return the key of the largest size, the first of several; ``none`` for an empty mapping."""
    return max(sizes, key=sizes.__getitem__, default="none")
