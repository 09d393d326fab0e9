"""Detect missing tensors (parameters never written after construction) and shape mismatches."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections.abc import Iterator, Sequence

import torch
from comfy.quant_ops import QuantizedTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ....precision.base.errors import CheckpointError
from ....precision.base.layers import kind_of
from ....precision.base.message import Message, joined
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.formats.registry import stored_shapes
from ..comfyui.attributes import dtype_made_for, made_when_loaded, quantization_format

aten = torch.ops.aten
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
ZEROS = aten.zeros.default
COPIES = {aten._to_copy.default, aten.clone.default}
SHOWN = 5
TENSOR_NAME = re.compile(r"\w+(\.[\w-]+)+")
AGAIN = "Download it again, or use another file."
MISFIT = joined(
    [
        "Are these parts of two models with the same file names?",
        "Download the model again, into an empty folder.",
    ]
)
_MISMATCH = re.compile(r"size mismatch for (\S+): .*?Size\(\[(.*?)\]\) from checkpoint, .*?Size\(\[(.*?)\]\)")
logger = logging.getLogger("halfsafe")


class _Lacking(TorchDispatchMode):
    """Watches a model being made and loaded: which of its parameters are memory that nothing was written to.

    ComfyUI loads with ``strict=False``, and its layers do not initialize their weights (``disable_weight_init``): such
    a parameter holds what was in that memory before. Parameters with a default of ComfyUI's own are written to.
    """

    def __init__(self, paths: Sequence[str]):
        super().__init__()
        self._paths = paths
        self._unwritten: set[StorageWeakRef] = set()
        self._zeros: set[StorageWeakRef] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper around the method takes as long as the method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        makes, copies, written = _effect(func)
        if func is ZEROS:
            self._zeros.update(_storages(result))
        if makes or (copies and self._is_unwritten(args[0])):
            self._unwritten.update(_storages(result))
        elif self._unwritten:
            for place in written:
                self._unwritten.difference_update(_storages(args[place]))
        return result

    def _is_unwritten(self, tensor: object) -> bool:
        return not self._unwritten.isdisjoint(_storages(tensor))

    def _is_stand_in(self, layer: torch.nn.Module, leaf: str, tensor: object) -> bool:
        """True for the zeros that ComfyUI loads a Linear with where dynamic VRAM is on and the file has no such tensor
        (``_lazy_load_from_state_dict`` in comfy/ops.py)."""
        return leaf in made_when_loaded(layer) and not self._zeros.isdisjoint(_storages(tensor))

    def refuse(
        self, module: torch.nn.Module, unless: re.Pattern | None = None, without: str = "", fill: float = math.nan
    ) -> list[str]:
        """Refuse a model of which the file lacks a tensor, or has one in another shape.

        ``unless``: names of parts that a model does without; they are filled with ``fill``, so that nothing computes
        with what was in their memory before. A note tells of them where ``without`` says what happens without them.
        """
        names = self._names(module)
        filled = [name for name in names if unless and unless.search(name)]
        if lacking := [name for name in names if name not in filled]:
            problem = Message("lacks {0}, without which the model cannot run", ", ".join(lacking[:SHOWN]))
            raise CheckpointError(", ".join(self._paths), problem, advice=AGAIN)
        for name in filled:
            layer, _, leaf = name.rpartition(".")
            _fill(module.get_submodule(layer), leaf, fill)
        if not filled or not without:
            return []
        note = Message("The file lacks {0} tensors (first: {1}): {2}.", len(filled), filled[0], without)
        logger.warning("Halfsafe: %s: %s", self._paths[0], note)
        return [note]

    def _names(self, module: torch.nn.Module) -> list[str]:
        """List the parameters of a module that the file had nothing for."""
        none = []
        unwritten = []
        for name, part in module.named_modules():
            weight = getattr(part, "weight", part)
            # ComfyUI's quantized layers take a weight of any shape, and have none before they are given one
            # (``_load_quantized_module`` in comfy/ops.py); without one their bias is not loaded either.
            if weight is None and kind_of(part):
                none.append(f"{name}.weight")
            other = None if weight is part else _other_shape(part)
            if other and not self._is_stand_in(part, other[0], part._parameters[other[0]]):
                raise _misfit(self._paths, f"{name}.{other[0]}", *other[1:])
            own = part._parameters.items() if self._unwritten or self._zeros else ()
            unwritten += [
                f"{name}.{leaf}".lstrip(".")
                for leaf, tensor in own
                if self._is_unwritten(tensor) or self._is_stand_in(part, leaf, tensor)
            ]
        return none + [name for name in unwritten if f"{name.rpartition('.')[0]}.weight" not in none]


def _other_shape(part: torch.nn.Module) -> tuple[str, Sequence[int], Sequence[int], Sequence[int]] | None:
    """Return name, shape, expected shape and shape of the data of a layer's parameter that does not fit the layer.

    Layers that ComfyUI loads by its own code take a tensor of any shape: quantized ones, those beside them, and under
    dynamic VRAM all (``_load_quantized_module`` and ``_lazy_load_from_state_dict`` in comfy/ops.py).
    """
    made_for = vars(part)
    if "in_features" in made_for:
        shape = (made_for["out_features"], made_for["in_features"])
    elif "num_embeddings" in made_for:
        shape = (made_for["num_embeddings"], made_for["embedding_dim"])
    else:
        return None
    weight, bias = part._parameters.get("weight"), part._parameters.get("bias")
    if isinstance(weight, QuantizedTensor):
        stored = weight.storage_shape
        fitting = stored_shapes(quantization_format(part), *shape)
        if tuple(stored[-2:]) not in fitting:  # a bank of experts has one more dimension
            columns = stored[-1] * shape[1] // max(1, fitting[0][1])
            return "weight", (stored[-2], columns), shape, stored
    elif weight is not None and weight.dim() == 2 and weight.shape != shape:
        return "weight", weight.shape, shape, weight.shape
    if bias is not None and bias.dim() == 1 and len(bias) != shape[0]:
        return "bias", bias.shape, shape[:1], bias.shape
    return None


@functools.cache  # torch hashes an operation in Python, which takes longer than all else here
def _effect(func: torch._ops.OpOverload) -> tuple[bool, bool, list[int]]:
    """Return whether an operation allocates memory, whether it copies, and the positions of the arguments it writes to;
    arguments given by name are results."""
    arguments = (argument.alias_info for argument in func._schema.arguments if not argument.kwarg_only)
    written = [place for place, alias in enumerate(arguments) if alias is not None and alias.is_write]
    return func in EMPTY, func in COPIES, written


def _fill(layer: torch.nn.Module, leaf: str, fill: float) -> None:
    """Fill a parameter of a layer. A Linear that ComfyUI left without one, or with zeros of another shape in its place,
    is given one."""
    held = getattr(layer, leaf)
    if held is None or leaf in made_when_loaded(layer):
        dtype = layer.factory_kwargs["dtype"] if held is None else dtype_made_for(layer, leaf) or held.dtype
        shape = (layer.out_features, layer.in_features) if leaf == "weight" else (layer.out_features,)
        held = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        setattr(layer, leaf, held)
    held.data.fill_(fill)


def _storages(value: object) -> list[StorageWeakRef]:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return [StorageWeakRef(value.untyped_storage())] if plain else []  # type: ignore[attr-defined]


@contextlib.contextmanager
def lacking_tensors(*paths: str, complete: bool = False) -> Iterator[_Lacking]:
    """Watch ComfyUI load a model of these files. ``complete``: they have a tensor for each parameter, so that no
    operation is watched."""
    lacking = _Lacking(paths)
    with named_if_lacking(*paths), contextlib.nullcontext() if complete else lacking:
        yield lacking


@contextlib.contextmanager
def named_if_lacking(*paths: str) -> Iterator[None]:
    """Raise an error that names tensor and files if ComfyUI looks for a tensor that no file has, or finds another shape
    than the model's; other errors pass."""
    try:
        yield
    except (KeyError, UnboundLocalError) as error:
        if not (name := _looked_for(error)):
            raise
        problem = Message("lacks {0}, which ComfyUI needs to recognise the architecture", name)
        raise CheckpointError(", ".join(paths), problem, advice=AGAIN) from error
    except RuntimeError as error:
        found = _MISMATCH.search(str(error))
        if found is None:
            raise
        shape, expected = ([int(size) for size in re.findall(r"\d+", sizes)] for sizes in found.groups()[1:])
        raise _misfit(paths, found[1], shape, expected) from error


def _looked_for(error: KeyError | UnboundLocalError) -> str:
    """Return the name of the tensor that ComfyUI looked for in a state dict; empty for an error of another kind."""
    if isinstance(error, UnboundLocalError):  # comfy/text_encoders/long_clipl.py tells a CLIP by this layer
        return "text_model.encoder.layers.1.mlp.fc1.weight" if "'model_name'" in str(error) else ""
    key = error.args[0] if error.args else None
    return key if isinstance(key, str) and TENSOR_NAME.fullmatch(key) else ""


def _misfit(
    paths: Sequence[str], tensor: str, shape: Sequence[int], expected: Sequence[int], stored: Sequence[int] = ()
) -> CheckpointError:
    """Return the error that names the file or shard of a tensor of another shape; all files if several may hold it.

    ``stored``: its shape in the file, where several numbers lie in a byte.

    A tensor has another prefix in the model than in its file: ``model.diffusion_model.`` and the like.
    """
    opened = ((file, name) for path in paths for file in [open_checkpoint(path)] for name in file)
    alike = ((file, name) for file, name in opened if file.entries[name].shape == tuple(stored or shape))
    files = {str(file.entries[name].file) for file, name in alike if name.endswith(tensor) or tensor.endswith(name)}
    problem = Message("of shape {0}, but the model has {1}", "x".join(map(str, shape)), "x".join(map(str, expected)))
    return CheckpointError(files.pop() if len(files) == 1 else ", ".join(paths), problem, tensor, MISFIT)
