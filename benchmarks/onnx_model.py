"""An ONNX file as a torch module, for files whose graph has the operations in ``OPERATIONS``; no package of ONNX is needed."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

# Numbers of fields in onnx/onnx.proto of https://github.com/onnx/onnx.
GRAPH = 7
OF_GRAPH = {"node": 1, "initializer": 5, "output": 12}
OF_NODE = {"input": 1, "output": 2, "op_type": 4, "attribute": 5}
OF_ATTRIBUTE = {"name": 1, "f": 2, "i": 3, "s": 4, "ints": 8}
OF_TENSOR = {"dims": 1, "data_type": 2, "name": 8, "raw_data": 9}
OF_VALUE = {"name": 1}
DTYPES = {1: "<f4", 7: "<i8"}


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field of a protobuf message: a whole number, or its bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, place = _varint(data, place)
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value - (1 << 64) if value >> 63 else value, place


def _message(data: memoryview, names: dict[str, int]) -> dict[str, list]:
    """Return the values of the fields of a message, by name."""
    found = defaultdict(list)
    for number, value in _fields(data):
        found[number].append(value)
    return {name: found[number] for name, number in names.items()}


def _tensor(data: memoryview) -> tuple[str, torch.Tensor]:
    found = _message(data, OF_TENSOR)
    values = np.frombuffer(found["raw_data"][0], DTYPES[found["data_type"][0]])
    return _text(found["name"][0]), torch.from_numpy(values.reshape(found["dims"]).copy())


def _attribute(data: memoryview) -> tuple[str, object]:
    found = _message(data, OF_ATTRIBUTE)
    if found["f"]:
        value = struct.unpack("<f", found["f"][0])[0]
    elif found["s"]:
        value = _text(found["s"][0])
    else:
        value = found["i"][0] if found["i"] else found["ints"]
    return _text(found["name"][0]), value


def _text(data: memoryview) -> str:
    return bytes(data).decode()


class OnnxModel(torch.nn.Module):
    """The graph of an ONNX file, in fp32.

    ``linears``: a Linear for each matrix product by a weight and each convolution of size 1, by the name of its layer.
    """

    def __init__(self, path: Path):
        super().__init__()
        file = _message(memoryview(path.read_bytes()), {"graph": GRAPH})
        graph = _message(file["graph"][0], OF_GRAPH)
        self.constants = dict(map(_tensor, graph["initializer"]))
        self.output = _text(_message(graph["output"][0], OF_VALUE)["name"][0])
        self.nodes: list[tuple[Callable, list[str], list[str]]] = []
        self.linears: dict[str, torch.nn.Linear] = {}
        for data in graph["node"]:
            node = _message(data, OF_NODE)
            inputs, outputs = ([_text(name) for name in node[side]] for side in ("input", "output"))
            self._add(_text(node["op_type"][0]), inputs, outputs, dict(map(_attribute, node["attribute"])))

    def _add(self, kind: str, inputs: list[str], outputs: list[str], options: dict) -> None:
        weight = self.constants.get(inputs[1]) if kind in ("Gemm", "Conv") else None
        if weight is not None and weight[0, 0].numel() == 1:
            name = inputs[1].removesuffix(".weight")
            self.linears[name] = linear = _linear(weight.flatten(1), self.constants[inputs[2]])
            run: Callable = _over_channels(linear) if kind == "Conv" else linear
            inputs = inputs[:1]
        else:
            run = OPERATIONS[kind](options)
        self.nodes.append((run, inputs, outputs))

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the first output for inputs by name."""
        values = {**self.constants, **inputs, "": None}
        for run, names, outputs in self.nodes:
            results = run(*(values[name] for name in names))
            results = results if isinstance(results, tuple) else (results,)
            values.update(zip(outputs, results, strict=True))
        return values[self.output]


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.data, linear.bias.data = weight.contiguous(), bias
    return linear


def _over_channels(linear: torch.nn.Linear) -> Callable:
    return lambda x: linear(x.movedim(1, -1)).movedim(-1, 1)


def _reshaped(x: torch.Tensor, shape: torch.Tensor, keeps_zeros: int) -> torch.Tensor:
    sizes = [x.shape[i] if size == 0 and not keeps_zeros else size for i, size in enumerate(shape.tolist())]
    return x.reshape(sizes)


def _unsqueezed(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    for axis in axes.reshape(-1).tolist():
        x = x.unsqueeze(axis)
    return x


def _squeezed(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze()


OPERATIONS: dict[str, Callable[[dict], Callable]] = {
    "Add": lambda o: torch.add,
    "Sub": lambda o: torch.sub,
    "Mul": lambda o: torch.mul,
    "Div": lambda o: torch.div,
    "Pow": lambda o: torch.pow,
    "Reciprocal": lambda o: torch.reciprocal,
    "Sqrt": lambda o: torch.sqrt,
    "Log": lambda o: torch.log,
    "Sin": lambda o: torch.sin,
    "Cos": lambda o: torch.cos,
    "Sigmoid": lambda o: torch.sigmoid,
    "Clip": lambda o: torch.clamp,
    "Squeeze": lambda o: _squeezed,
    "Unsqueeze": lambda o: _unsqueezed,
    "Shape": lambda o: lambda x: torch.tensor(x.shape[o["start"] : o.get("end")]),
    "Reshape": lambda o: lambda x, shape: _reshaped(x, shape, o["allowzero"]),
    "Concat": lambda o: lambda *parts: torch.cat(parts, o["axis"]),
    "Split": lambda o: lambda x: x.chunk(o["num_outputs"], o["axis"]),
    "Softmax": lambda o: lambda x: x.softmax(o["axis"]),
    "Einsum": lambda o: lambda *parts: torch.einsum(o["equation"], *parts),
    "Conv": lambda o: lambda x, weight, bias: F.conv2d(x, weight, bias, o["strides"], o["pads"][:2]),
    "AveragePool": lambda o: lambda x: F.avg_pool2d(x, o["kernel_shape"], o["strides"]),
    "Resize": lambda o: lambda x, _, scales: F.interpolate(x, scale_factor=scales[2:].tolist(), mode=o["mode"]),
    "InstanceNormalization": lambda o: lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=o["epsilon"]),
}
"""Kind of node -> a function of its attributes that makes the function of its inputs."""
