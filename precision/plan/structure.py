"""Find the role of each layer by names and shapes: in the repeated blocks, outside of them, or
their modulation.

Names and shapes suffice: of a file's header, of a loaded model, of a model on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .facts import LayerSpec

    Block = Sequence[LayerSpec]
    Stack = Sequence[Block]
    Path = tuple[list[str], LayerSpec]

OUTSIDE = "outside"
MODULATION = "modulation"
ROLES = (OUTSIDE, MODULATION)
SIDE_BLOCKS = 4
SIDE_SHARE = 0.05
FEWEST_VECTORS = 4
MLP_LAYERS = 2
_NUMBERED = re.compile(r"(.*?)\d+")
_NUMBER = re.compile(r"\d+")


def roles_of(layers: Iterable[LayerSpec]) -> Mapping[str, str]:
    """Return the role of layers, by name: ``outside`` the repeated blocks, or ``modulation`` in
    one. Others have none.

    Only layers that multiply have a role, and only in models that have blocks. Names and shapes do
    not show a modulation of fewer than four vectors (in Flux's single blocks it has the shape of a
    fused qkv) nor one as large as the hidden layer of its block's MLP, or twice that (Lumina 2).
    For those the presets' names remain."""
    layers = [layer for layer in layers if layer.multiplies]
    stacks = stacks_of(layers)
    modulation = {layer.name for stack in stacks for block in stack for layer in _modulation(block)}
    body = _without_side_stacks(stacks, modulation, _weights(layers))
    inside = {layer.name for stack in body for block in stack for layer in block}
    outside = [layer.name for layer in layers if layer.name not in inside] if inside else []
    return dict.fromkeys(outside, OUTSIDE) | dict.fromkeys(modulation & inside, MODULATION)


def stacks_of(layers: Iterable[LayerSpec]) -> list[Stack]:
    """List the stacks of repeated blocks of a model.

    Blocks are the elements of a numbered container (``blocks.0``, ``blocks.block0``,
    ``input_blocks.4``) that hold two layers or more and share names with another of its elements,
    whatever their widths. The only such element is a block where it is no mere MLP of two layers,
    as the projection of a text (``mlp_t5``) or of the time is, and no model with blocks of its own
    (``img2shape_512`` of Trellis 2). Blocks in blocks do not count."""
    return _stacks([(layer.name.split("."), layer) for layer in layers])


def _stacks(paths: Sequence[Path]) -> list[Stack]:
    found: list[Stack] = []
    for elements in _containers(paths):
        names = _alike(elements)
        blocks = [[layer for _, layer in elements[name]] for name in names]
        inner = [stack for name in elements if name not in names for stack in _stacks(elements[name])]
        # A UNet's middle block is a container of two alike and one with blocks of its own: they are one stack.
        found += [[*blocks, *(block for stack in inner for block in stack)]] if blocks else inner
    return found


def _containers(paths: Sequence[Path]) -> Iterable[dict[str, list[Path]]]:
    """Group layers by the first part of their path, and these parts by what they are called without
    a number."""
    containers: dict[str, dict[str, list[Path]]] = {}
    for (head, *rest), layer in paths:
        if rest:
            numbered = _NUMBERED.fullmatch(head)
            container = f"{numbered[1]}#" if numbered else head
            containers.setdefault(container, {}).setdefault(head, []).append((rest, layer))
    return containers.values()


def _alike(elements: Mapping[str, list[Path]]) -> list[str]:
    large = [name for name, paths in elements.items() if len(paths) > 1 and _NUMBERED.fullmatch(name)]
    if len(large) == 1:
        only = elements[large[0]]
        return large if len(only) > MLP_LAYERS and not _stacks(only) else []
    contents = {name: frozenset(_NUMBER.sub("", ".".join(path)) for path, _ in elements[name]) for name in large}
    kinds = set(contents.values())
    repeated = {kind for kind in kinds if list(contents.values()).count(kind) > 1}
    repeated |= {kind for a, b in combinations(kinds, 2) if 2 * len(a & b) >= min(len(a), len(b)) for kind in (a, b)}
    return [name for name in large if contents[name] in repeated]


def _without_side_stacks(stacks: Sequence[Stack], modulation: set[str], weights: int) -> list[Stack]:
    """Leave out short stacks: refiners, connectors and adapters, with under a quarter of the
    longest stack's blocks.

    Stacks of one length go together, the shortest first, while all left out hold at most 5 % of
    ``weights``. Those that hold more (the refiners of Z-Image) are the model's body as much as the
    rest. Modulation stays high anyway and does not count."""
    longest = max(map(len, stacks), default=0)
    body = list(stacks)
    for length in sorted({len(stack) for stack in stacks if SIDE_BLOCKS * len(stack) < longest}):
        side = [layer for stack in stacks if len(stack) <= length for block in stack for layer in block]
        if _weights(layer for layer in side if layer.name not in modulation) > SIDE_SHARE * weights:
            break
        body = [stack for stack in stacks if len(stack) > length]
    return body


def _weights(layers: Iterable[LayerSpec]) -> int:
    return sum(prod(layer.shape) for layer in layers)


def _modulation(block: Block) -> list[LayerSpec]:
    """List the linear layers of a block that make shifts, scales and gates of a vector.

    Their output has four times a stream's width or more (three, where the input has another width
    than the streams), and no layer of the block takes it as the second layer of an MLP takes the
    first's."""
    linears = [layer for layer in block if layer.cls == "Linear"]
    outputs = {layer.shape[0] for layer in linears}
    inputs = {layer.shape[1] for layer in linears}
    widening = [layer for layer in linears if layer.shape[0] >= layer.shape[1] and layer.shape[1] > 0]
    widths = {layer.shape[1] for layer in widening} & outputs
    return [layer for layer in linears if _makes_vectors(layer, widths) and not _is_taken(layer, inputs, outputs)]


def _makes_vectors(layer: LayerSpec, widths: set[int]) -> bool:
    out, width = layer.shape
    counts = [out // stream for stream in widths if out % stream == 0]
    return bool(counts) and min(counts) >= FEWEST_VECTORS - (width not in widths)


def _is_taken(layer: LayerSpec, inputs: set[int], outputs: set[int]) -> bool:
    """True if a layer of the block takes the output: an MLP's second, attention's last, or Flux's
    that is both.

    That one takes the attention beside the MLP, whose first layer ComfyUI fuses with q, k and v
    (``linear1``), and diffusers does not (``proj_mlp``)."""
    out, width = layer.shape
    others = {size for size in inputs if size not in outputs and 2 * size not in outputs}
    return bool({out, out / 2} & inputs) or bool({out / 3, out - 2 * width, (out - width) / 2, out + width} & others)
