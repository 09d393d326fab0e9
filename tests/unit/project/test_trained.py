"""What measures formats on trained weights: the ONNX reader on a file written by hand, GGUF's Q8_0, and the round trips."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bench_quality import Recorder, changed, layer_errors, relative_error, targets
from onnx_graph import read_onnx
from quantized_formats import Format, formats, q8_0
from trained import bert

VARINT, BYTES = 0, 2


def varint(value: int) -> bytes:
    value, out = value % (1 << 64), bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def tensor(name: str, data: torch.Tensor) -> bytes:
    kind = {torch.float32: 1, torch.int64: 7}[data.dtype]
    dims = b"".join(field(1, size) for size in data.shape)
    return field(5, dims + field(2, kind) + field(8, name) + field(9, data.contiguous().numpy().tobytes()))


def node(op: str, inputs: list[str], output: str, **attributes: int | float | list[int]) -> bytes:
    body = b"".join(field(1, name) for name in inputs) + field(2, output) + field(4, op)
    for name, value in attributes.items():
        if isinstance(value, float):
            made = varint(2 << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            made = field(3, value)
        else:
            made = field(8, b"".join(map(varint, value)))
        body += field(5, field(1, name) + made)
    return field(1, body)


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A convolution of stride 2, a norm, a sigmoid gate, a matrix."""
    torch.manual_seed(0)
    weights = {
        "conv.weight": torch.randn(4, 3, 3, 3), "conv.bias": torch.randn(4), "scale": torch.randn(4), "shift": torch.randn(4),
        "flat": torch.tensor([0, -1]), "out.weight": torch.randn(5, 64), "out.bias": torch.randn(5),
    }  # fmt: skip
    nodes = [
        node("Conv", ["x", "conv.weight", "conv.bias"], "a", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("InstanceNormalization", ["a", "scale", "shift"], "b", epsilon=1e-3),
        node("Sigmoid", ["b"], "c"),
        node("Mul", ["b", "c"], "d"),
        node("Reshape", ["d", "flat"], "e"),
        node("Gemm", ["e", "out.weight", "out.bias"], "y", transB=1),
    ]
    graph = b"".join(nodes) + b"".join(tensor(*item) for item in weights.items()) + field(11, field(1, "x")) + field(12, field(1, "y"))
    path = tmp_path / "model.onnx"
    path.write_bytes(field(1, 8) + field(7, graph))
    return path, weights


def expected(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    a = F.conv2d(x, weights["conv.weight"], weights["conv.bias"], 2, 1)
    b = F.instance_norm(a, weight=weights["scale"], bias=weights["shift"], eps=1e-3)
    return F.linear((b * b.sigmoid()).flatten(1), weights["out.weight"], weights["out.bias"])


def test_a_graph_is_read_and_gives_what_torch_gives(file):
    path, weights = file
    graph, x, seen = read_onnx(path), torch.randn(2, 3, 8, 8), {}
    assert graph.inputs == ["x"] and graph.outputs == ["y"]
    assert {name: tuple(w.shape) for name, w in graph.weights.items()} == {name: tuple(w.shape) for name, w in weights.items()}

    def product(name, rows, weight, bias):
        seen[name] = tuple(rows.shape)
        return F.linear(rows, weight, bias)

    assert torch.allclose(graph.run({"x": x}, product)[0], expected(weights, x), atol=1e-4)
    assert seen == {"conv": (2, 16, 27), "out": (2, 64)}


def test_a_float_attribute_is_read(file):
    norm = next(node for node in read_onnx(file[0]).nodes if node.op == "InstanceNormalization")
    assert norm.attributes["epsilon"] == pytest.approx(1e-3)


def test_q8_0_is_ggmls_number_by_number():
    weight = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    weight[1, 32:64] = 0
    found = q8_0(weight)
    for row in range(3):
        for block in range(3):
            values = weight[row, 32 * block : 32 * block + 32].tolist()
            step = max(map(abs, values)) / 127
            stored = torch.tensor(step).half().item()
            codes = [round(value / step) if step else 0 for value in values]
            assert found[row, 32 * block : 32 * block + 32].tolist() == pytest.approx([code * stored for code in codes], abs=1e-6)
    assert relative_error(weight, found) < 0.006


BOUNDS = {"fp8_e4m3fn": 0.028, "int8, rotated": 0.009, "int8, not rotated": 0.009, "Q8_0": 0.006, "mxfp8": 0.03, "nvfp4": 0.11, "w4a8": 0.09, "w6a8": 0.025}


def test_every_format_is_as_exact_as_its_bits():
    pytest.importorskip("comfy_kitchen")
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)) * 0.02
    found = formats()
    assert set(BOUNDS) - {"w4a8", "w6a8"} <= set(found)
    for name, form in found.items():
        for rounding in (form.weight, *([form.inputs] if form.inputs else [])):
            made = rounding(weight)
            assert made.shape == weight.shape and made.dtype == torch.float32 and torch.isfinite(made).all()
        assert BOUNDS[name] / 2 < relative_error(weight, form.weight(weight)) < BOUNDS[name], name


def test_layers_are_recorded_and_exchanged():
    torch.manual_seed(3)
    weights = [torch.randn(64, 64) / 8, torch.randn(5, 20)]
    x = torch.randn(3, 7, 64)

    def run(product):
        return product("b", product("a", x, weights[0], None)[..., :20], weights[1], None)

    recorder = Recorder()
    exact = run(recorder)
    assert list(recorder.rows) == ["a"] and torch.equal(recorder.rows["a"], x.view(-1, 64)), "b has 20 inputs"
    half = Format(16, lambda w: w * 1.5, lambda rows: rows * 2)
    held = {"a": half.weight(weights[0])}
    assert layer_errors(recorder, held, None) == pytest.approx([0.5])
    assert layer_errors(recorder, held, half.inputs) == pytest.approx([2.0])
    assert torch.allclose(run(changed(held, half.inputs)), 3 * exact, atol=1e-4)


def test_the_encoder_pools_and_masks():
    torch.manual_seed(4)
    width, layer = 24, "encoder.layer.0"
    sizes = {"attention.self.query": (24, 24), "attention.self.key": (24, 24), "attention.self.value": (24, 24), "attention.output.dense": (24, 24),
             "intermediate.dense": (48, 24), "output.dense": (24, 48)}  # fmt: skip
    weights = {f"embeddings.{name}_embeddings.weight": torch.randn(count, width) for name, count in (("word", 9), ("position", 8), ("token_type", 2))}
    for name, size in sizes.items():
        weights |= {f"{layer}.{name}.weight": torch.randn(size), f"{layer}.{name}.bias": torch.randn(size[0])}
    for name in ("embeddings.LayerNorm", f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"):
        weights |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}

    def plain(name, x, weight, bias):
        return F.linear(x, weight, bias)

    tokens, mask = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 5]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    found = bert(weights, tokens, mask, plain)
    assert found.shape == (2, width) and torch.allclose(found[0], found[1], atol=1e-6), "a padded word counts"
    assert torch.allclose(found, bert(weights, tokens[:, :3], mask[:, :3], plain), atol=1e-5)


def test_the_target_is_the_worst_model():
    rows = [
        {"model": model, "format": name, "weights": weights, "products": products}
        for model, name, weights, products in [
            ("a", "fp8_e4m3fn", 0.02, 0.03), ("a", "int8, rotated", 0.006, 0.009), ("b", "fp8_e4m3fn", 0.02, 0.03), ("b", "int8, rotated", 0.012, 0.012),
        ]
    ]  # fmt: skip
    found = targets(rows)
    assert found["int8_to_fp8_weights"] == {"limit": 0.5, "measured": 0.6, "met": False} and found["int8_to_fp8_products"]["met"]
