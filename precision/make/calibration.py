"""A calibration of a model: the products of its layers' inputs, kept in memory or in a safetensors
file.

The squared error that a change ``D`` of a weight (rows, K) makes on inputs ``X`` (tokens, K) is
``tr(D H D^T)`` with ``H = X^T X``. Whole, H of 14336 inputs takes 822 MB; its blocks of 256 take 15
MB and keep most of what it knows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..base.errors import CheckpointError, HalfsafeError
from ..base.message import Message, joined
from ..base.text import listed, size_text
from ..files.safetensors_file import open_checkpoint, write_safetensors
from ..files.safetensors_header import TensorSpec, read_object
from ..files.tensor_file import TensorFile
from ..formats.format import Format
from ..formats.int8 import rotation_group

KEY = "halfsafe_calibration"
FINGERPRINT = "sha256_of_header_and_4096_bytes_of_each_tensor"
WIDTHS = (1024, 512, 256)
ROWS = 2048
OF_CALLS = "{0} layers, {1}, in {2} model calls of {3}; {4} in memory, blocks of up to {5} inputs."
SKIPPED = "Inputs with NaN or Inf were skipped: {0}. Add NaN Guard to find the cause."


def _block_width(columns: int, width: int) -> int:
    """Return the width of equal blocks of ``columns`` inputs, ``width`` at most: a multiple of the
    rotation's group."""
    group = rotation_group(columns) or 1
    units = columns // group
    counts = (count for count in range(-(-columns // width), units) if units % count == 0)
    return columns // next(counts, units)


def products_bytes(columns: Iterable[int], width: int) -> int:
    """Count the bytes of the products of layers with so many inputs."""
    return sum(number * _block_width(number, width) * 4 for number in columns)


@dataclass
class Products:
    """Sums of ``x^T x`` over ``tokens`` inputs of a layer: fp32 blocks ``(K / width, width,
    width)`` in host memory.

    ``left_out``: inputs that hold NaN or Inf, which are not in the sums.
    """

    blocks: torch.Tensor
    tokens: int = 0
    left_out: int = 0

    @classmethod
    def empty(cls, columns: int, width: int) -> Products:
        width = _block_width(columns, width)
        with torch.inference_mode(False):
            return cls(torch.zeros(columns // width, width, width))

    @property
    def width(self) -> int:
        return self.blocks.shape[1]

    @property
    def columns(self) -> int:
        return self.blocks.shape[0] * self.width

    def turned(self, format: Format) -> torch.Tensor:
        """Return the blocks of the products of turned inputs."""
        half = format.turned(self.blocks.flatten(0, 1)).view_as(self.blocks)
        return format.turned(half.mT.flatten(0, 1)).view_as(self.blocks)

    @torch.no_grad()
    def add(self, x: torch.Tensor) -> None:
        """Add a layer's input ``(..., K)``, of which at most ``ROWS`` tokens, spread evenly, are
        taken."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > ROWS:
            rows = rows[torch.linspace(0, len(rows) - 1, ROWS, device=x.device).long()]
        rows = rows.float()
        finite = torch.isfinite(rows).all(1)
        count = int(finite.sum())
        if count < len(rows):
            self.left_out += len(rows) - count
            rows = rows[finite]
        self.tokens += count
        parts = rows.unflatten(1, (-1, self.width)).transpose(0, 1)
        self.blocks += torch.bmm(parts.mT, parts).cpu()


@dataclass(frozen=True)
class CalibrationData:
    """Sums over the inputs of one model's layers.

    Attributes:
        model: the file it was loaded from, as :func:`~halfsafe.precision.formats.card.source_of` describes it; empty
            where the file is not known.
        cls: ComfyUI's class of the model.
        width: the widest block asked for.
        layers: layer name inside the diffusion model -> products of its inputs.
        runs: how many samplings are in it, ``calls``: how many calls of the model.
    """

    model: Mapping[str, object]
    cls: str
    width: int
    layers: dict[str, Products] = field(default_factory=dict)
    runs: int = 0
    calls: int = 0

    @property
    def name(self) -> str:
        """The model in words: its file, or its class."""
        return str(self.model.get("file") or self.cls)

    def usable(self, layer: str) -> Products | None:
        """Return the products of a layer that has met something."""
        products = self.layers.get(layer)
        return products if products is not None and products.tokens else None

    def copied(self) -> dict[str, Products]:
        """Copy the sums of all layers, for more to be added to them."""
        with torch.inference_mode(False):
            return {name: replace(sums, blocks=sums.blocks.clone()) for name, sums in self.layers.items()}

    def require_model(self, model: Mapping[str, object], name: str, columns: Mapping[str, int]) -> None:
        """Raise HalfsafeError if the calibration is of another model, by its file, if both files
        are known, and by its layers.

        Args:
            columns: layer -> its number of inputs, of at least the layers that are calibrated.
        """
        mine = self.model.get(FINGERPRINT)
        other = model.get(FINGERPRINT)
        odd = next((layer for layer, sums in self.layers.items() if columns.get(layer) != sums.columns), None)
        if odd is None and (mine == other or not mine or not other):
            return
        problem = Message("The calibration was made on another model: {0}, not {1}", self.name, name)
        why: str = "their files differ"
        if odd is not None:
            why = Message("layer '{0}' is missing or has another number of inputs", odd)
        raise HalfsafeError(Message("{0} ({1}).", problem, why), "Calibrate the same file that you save or convert.")

    def text(self) -> str:
        """Describe the calibration: layers, tokens, calls, memory, and inputs left out."""
        tokens = [sums.tokens for sums in self.layers.values() if sums.tokens]
        seen: str = "none was called"
        if tokens:
            seen = Message("{0} to {1} tokens each", f"{min(tokens):,}", f"{max(tokens):,}")
        runs = Message("{0} run" if self.runs == 1 else "{0} runs", self.runs)
        size = size_text(sum(sums.blocks.nbytes for sums in self.layers.values()))
        lines = [
            Message("Calibration of {0} ({1})", self.name, self.cls),
            Message(OF_CALLS, len(tokens), seen, self.calls, runs, size, self.width),
        ]
        if unreached := [name for name in self.layers if self.usable(name) is None]:
            lines.append(Message("Rounded to nearest because they were not called: {0}.", listed(unreached)))
        if left_out := [f"{name} ({sums.left_out})" for name, sums in self.layers.items() if sums.left_out]:
            lines.append(Message(SKIPPED, listed(left_out)))
        return joined(lines, "\n")

    @classmethod
    def read(cls, path: str | os.PathLike) -> CalibrationData:
        """Read a calibration file; its tensors are copied.

        Raises:
            CheckpointError: the file is damaged, or no calibration.
        """
        file = open_checkpoint(path)
        try:
            values = read_object(file.metadata[KEY])
            names = {layer: [int(number) for number in numbers] for layer, numbers in values["layers"].items()}
            model = dict(values["model"])
            name = str(values["class"])
            width, runs, calls = (int(values[key]) for key in ("width", "runs", "calls"))
            layers = {layer: _products(file, path, layer, *numbers) for layer, numbers in names.items()}
        except (KeyError, ValueError, TypeError, AttributeError):
            advice = "Use a file that Calibrate (Halfsafe) wrote."
            raise CheckpointError(path, "not a Halfsafe calibration", advice=advice) from None
        return cls(model, name, width, layers, runs, calls)

    def save(self, path: str | os.PathLike) -> None:
        """Write it to a safetensors file: of each layer's symmetric blocks the upper triangles, in
        fp32.

        Raises:
            CheckpointError: the file cannot be written.
        """
        counts = {name: [sums.width, sums.tokens, sums.left_out] for name, sums in self.layers.items()}
        values = {"model": dict(self.model), "class": self.cls, "width": self.width}
        values |= {"runs": self.runs, "calls": self.calls, "layers": counts}
        shapes = {name: (len(sums.blocks), sums.width * (sums.width + 1) // 2) for name, sums in self.layers.items()}
        specs = [TensorSpec(name, torch.float32, shape) for name, shape in shapes.items()]
        write_safetensors(path, specs, self._triangles(), {KEY: json.dumps(values)})

    def _triangles(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, sums in self.layers.items():
            row, column = torch.triu_indices(sums.width, sums.width)
            yield name, sums.blocks[:, row, column]


def _products(file: TensorFile, path, name: str, width: int, tokens: int, left_out: int) -> Products:
    size = width * (width + 1) // 2
    triangles = file[name] if name in file else torch.empty(0)
    if width < 1 or triangles.dim() != 2 or triangles.shape[1] != size or not torch.isfinite(triangles).all():
        raise CheckpointError(path, "a calibration whose sums are missing or damaged", name, "Calibrate again.")
    row, column = torch.triu_indices(width, width)
    with torch.inference_mode(False):
        blocks = torch.empty(len(triangles), width, width)
        blocks[:, row, column] = blocks[:, column, row] = triangles.float()
    return Products(blocks, tokens, left_out)
