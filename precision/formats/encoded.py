"""A weight in one of ComfyUI's quantization formats, made of the tensors in a file: a matrix, or a bank of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from .encoding import Encoding
from .registry import FORMATS, Format


@dataclass(frozen=True)
class Experts(Encoding):
    """A bank of experts' weights, ``(experts, rows, columns)``; each tensor's first dimension is ``num_experts``."""

    def __post_init__(self):
        if self.data.dim() != 3 or not self.data.numel():
            raise ValueError(f"a bank of experts of shape {tuple(self.data.shape)}")
        self._experts  # noqa: B018

    @cached_property
    def _experts(self) -> list[Encoding]:
        encoding, count = FORMATS[self.format].encoding, self.data.shape[0]
        tensors = ({name: _of_expert(t, i, count) for name, t in self.tensors.items()} for i in range(count))
        return [encoding(data, own, self.settings) for data, own in zip(self.data, tensors, strict=True)]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._experts), *self._experts[0].shape)

    @property
    def doubt(self) -> str:
        return next(filter(None, (expert.doubt for expert in self._experts)), "")

    def rows(self, part: slice) -> torch.Tensor:
        each = self.shape[1]
        first, last = part.start // each, (part.stop - 1) // each
        slices = [slice(max(part.start - i * each, 0), min(part.stop - i * each, each)) for i in range(first, last + 1)]
        return torch.cat([self._experts[i].rows(rows) for i, rows in enumerate(slices, first)])

    def bound(self) -> float:
        return max(expert.bound() for expert in self._experts)


def encoding_of(
    data: torch.Tensor, tensors: Mapping[str, torch.Tensor], settings: dict, outputs: int | None = None
) -> Encoding:
    """Make the weight that ``data``, those of its format's ``leaves`` that a file has, and ``comfy_quant`` stand for.

    Args:
        outputs: of the layer, if the file tells them; rows beyond those are padding.

    Raises:
        ValueError: a tensor is missing or does not fit the format; the message says why.
    """
    row = FORMATS[settings["format"]]
    missing = next((leaf for leaf in row.encoding.needs if leaf not in tensors), None)
    if missing:
        raise ValueError(f"without its {missing}")
    tensors = {name: _typed(tensor, row, name) for name, tensor in tensors.items()}
    if "num_experts" in settings:
        return Experts(data, tensors, settings)
    return row.encoding.read(data, tensors, settings, outputs)


def _typed(tensor: torch.Tensor, row: Format, leaf: str) -> torch.Tensor:
    """Return a scale that a file holds as bytes as ComfyUI reads it."""
    name, dtype = row.byte_scale or ("", "")
    if leaf != name or tensor.dtype != torch.uint8:
        return tensor
    if not hasattr(torch, dtype):
        raise ValueError(f"torch {torch.__version__} has no {dtype}")
    return tensor.view(getattr(torch, dtype))


def _of_expert(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    if tensor.shape[0] != count:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} for {count} experts")
    return tensor[index]
