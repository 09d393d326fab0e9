"""Read an ONNX file without the onnx package and run its graph in torch.

Field numbers: ``onnx/onnx.proto`` (ModelProto.graph 7; GraphProto.node 1, initializer 5, input 11, output 12; NodeProto.input 1,
output 2, op_type 4, attribute 5; AttributeProto.name 1, f 2, i 3, s 4, t 5, ints 8; TensorProto.dims 1, data_type 2, raw_data 9).
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

DTYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 11: torch.float64}
Product = Callable[[str, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""(name, rows (..., K), weight (N, K), bias) -> (..., N)"""


@dataclass(frozen=True)
class Node:
    """One operation: names of what it reads ("" for what is left out) and makes, and its attributes."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, object]


@dataclass(frozen=True)
class Graph:
    """The operations of a model in order, its weights by name, and the names of what it takes and gives."""

    nodes: list[Node]
    weights: dict[str, torch.Tensor]
    inputs: list[str]
    outputs: list[str]

    @torch.no_grad()
    def run(self, inputs: dict[str, torch.Tensor], product: Product) -> list[torch.Tensor]:
        """Run the graph; ``product`` makes the products of its matrices, a convolution's on the rows that its kernel meets."""
        values = {"": None, **self.weights, **inputs}
        for node in self.nodes:
            found = _run(node, [values[name] for name in node.inputs], product)
            values.update(zip(node.outputs, found if isinstance(found, (tuple, list)) else (found,), strict=True))
        return [values[name] for name in self.outputs]


def read_onnx(path: Path) -> Graph:
    """Read a model file."""
    graph = _message(_message(memoryview(path.read_bytes()))[7][0])
    weights = dict(map(_tensor, graph[5]))
    nodes = [_node(data) for data in graph[1]]
    inputs = [_text(_message(data)[1][0]) for data in graph[11]]
    return Graph(nodes, weights, inputs, [_text(_message(data)[1][0]) for data in graph[12]])


def _fields(data: memoryview) -> Iterator[tuple[int, object]]:
    """Yield the fields of a protobuf message: numbers as int, all else as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key & 7 == 0:
            value, place = _varint(data, place)
        else:
            size, place = _varint(data, place) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], place)
            value, place = data[place : place + size], place + size
        yield key >> 3, value


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, place = data[place], place + 1
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value - (1 << 64) if value >> 63 else value, place


def _message(data: memoryview) -> dict[int, list]:
    found = defaultdict(list)
    for number, value in _fields(data):
        found[number].append(value)
    return found


def _text(data: memoryview) -> str:
    return bytes(data).decode()


def _numbers(values: list) -> list[int]:
    """Repeated integers, packed into one field or not."""
    found = []
    for value in values:
        place = 0
        while not isinstance(value, int) and place < len(value):
            number, place = _varint(value, place)
            found.append(number)
        found += [value] if isinstance(value, int) else []
    return found


def _tensor(data: memoryview) -> tuple[str, torch.Tensor]:
    fields = _message(data)
    shape, dtype = _numbers(fields[1]), DTYPES[fields[2][0]]
    raw = bytearray(fields[9][0]) if fields[9] else bytearray()
    return _text(fields[8][0]) if fields[8] else "", torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def _node(data: memoryview) -> Node:
    fields = _message(data)
    attributes = dict(map(_attribute, fields[5]))
    return Node(_text(fields[4][0]), list(map(_text, fields[1])), list(map(_text, fields[2])), attributes)


def _attribute(data: memoryview) -> tuple[str, object]:
    fields = _message(data)
    name = _text(fields[1][0])
    if fields[2]:
        return name, struct.unpack("<f", fields[2][0])[0]
    if fields[3]:
        return name, fields[3][0]
    if fields[4]:
        return name, _text(fields[4][0])
    return name, _tensor(fields[5][0])[1] if fields[5] else _numbers(fields[8])


def _run(node: Node, x: list, product: Product):
    if node.op in ("Conv", "Gemm"):
        name = node.inputs[1].removesuffix(".weight")
        make = _convolution if node.op == "Conv" else _linear
        return make(name, *x, *[None] * (3 - len(x)), node.attributes, product)
    return OPERATIONS[node.op](x, node.attributes)


def _linear(name: str, x, weight, bias, options: dict, product: Product) -> torch.Tensor:
    return product(name, x, weight if options.get("transB") else weight.T, bias)


def _convolution(name: str, x, weight, bias, options: dict, product: Product) -> torch.Tensor:
    if weight.dim() == 3:
        return _convolution(name, x.unsqueeze(2), weight.unsqueeze(2), bias, {**options, "flat": True}, product).squeeze(2)
    pads, strides = options.get("pads", [0, 0, 0, 0]), options.get("strides", [1, 1])
    if options.get("flat"):
        pads, strides = [0, pads[0], 0, pads[-1]], [1, strides[-1]]
    rows = F.unfold(F.pad(x, (pads[1], pads[3], pads[0], pads[2])), weight.shape[2:], stride=strides)
    made = product(name, rows.transpose(1, 2), weight.flatten(1), bias).transpose(1, 2)
    height = (x.shape[2] + pads[0] + pads[2] - weight.shape[2]) // strides[0] + 1
    return made.reshape(len(x), len(weight), height, -1)


def _reshape(x: list, _) -> torch.Tensor:
    sizes = x[1].tolist()
    return x[0].reshape([x[0].shape[i] if size == 0 else size for i, size in enumerate(sizes)])


def _split(x: list, options: dict) -> tuple[torch.Tensor, ...]:
    axis = options.get("axis", 0)
    return x[0].split(x[1].tolist(), axis) if len(x) > 1 else x[0].chunk(options["num_outputs"], axis)


def _unsqueeze(x: list, _) -> torch.Tensor:
    result = x[0]
    for axis in sorted(x[1].flatten().tolist()):
        result = result.unsqueeze(axis)
    return result


def _resize(x: list, _) -> torch.Tensor:
    sizes = x[3].tolist()[2:] if len(x) > 3 and x[3] is not None else [int(s * f) for s, f in zip(x[0].shape[2:], x[2].tolist()[2:], strict=True)]
    return F.interpolate(x[0], size=sizes, mode="nearest")


OPERATIONS: dict[str, Callable] = {
    "Add": lambda x, _: x[0] + x[1], "Sub": lambda x, _: x[0] - x[1], "Mul": lambda x, _: x[0] * x[1], "Div": lambda x, _: x[0] / x[1],
    "Pow": lambda x, _: x[0] ** x[1], "Sqrt": lambda x, _: x[0].sqrt(), "Reciprocal": lambda x, _: x[0].reciprocal(),
    "Log": lambda x, _: x[0].log(), "Sin": lambda x, _: x[0].sin(), "Cos": lambda x, _: x[0].cos(), "Sigmoid": lambda x, _: x[0].sigmoid(),
    "Clip": lambda x, _: x[0].clamp(*x[1:]), "Softmax": lambda x, o: x[0].softmax(o.get("axis", -1)),
    "Concat": lambda x, o: torch.cat(x, o["axis"]), "Einsum": lambda x, o: torch.einsum(o["equation"], *x),
    "Shape": lambda x, o: torch.tensor(x[0].shape[o.get("start", 0) : o.get("end")]),
    "InstanceNormalization": lambda x, o: F.instance_norm(x[0], weight=x[1], bias=x[2], eps=o["epsilon"]),
    "AveragePool": lambda x, o: F.avg_pool2d(x[0], o["kernel_shape"], o["strides"]),
    "Squeeze": lambda x, _: x[0].squeeze(tuple(x[1].flatten().tolist())) if len(x) > 1 else x[0].squeeze(),
    "Reshape": _reshape, "Split": _split, "Unsqueeze": _unsqueeze, "Resize": _resize,
}  # fmt: skip
