"""Model files damaged in every way a file can be: genuine ones of each dialect, and what a seeded mutator makes of them."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from random import Random

import torch

from . import dialects

SHAPE = (32, 48)
LAYERS = ("blocks.0.ffn.0", "blocks.0.ffn.2")
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E8M0": 1, "I16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "F32": 4, "I64": 8, "F64": 8, "C64": 8, "F4": 1, "X": 1,
}  # fmt: skip
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
EXTREMES = (-1, 0, 1, 63, 2**31, 2**53, 2**62, 2**63 - 1, 2**64, 10**30, 10**4000)
NUMBERS = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e38, 1e300, 448.0, 65504.0)
SCALES = (
    "weight_scale", "weight_scale_inv", "scale_weight", "scale", "input_scale", "scale_input", "weight_scale_2", "weight_s_rel",
    "weight_s_channel", "weight_codebook", "weight_zeros", "pre_quant_scale",
)  # fmt: skip
NAMES = (
    "", ".", "weight", ".weight", "../../escaped.weight", "/etc/passwd", "a/b.weight", "a\0b.weight", "a\nb.weight",
    "\x1b[31mred.weight", "\u202egnp.weight", "\ud800.weight", "blocks.².weight", f"blocks.{'9' * 5000}.weight", "x" * 70_000,
    "a." * 2000 + "weight", "__metadata__", "blocks.0.ffn.0.weight.weight_scale", "blocks.0.ffn.0.bias", "scaled_fp8",
    ".comfy_quant", "weight_scale", "blocks.0.ffn.k_scale", "a.lora_down.weight", "a.absmax", "model.diffusion_model.a.weight",
    "net.weight", "head.modulation", *(f"blocks.0.ffn.0.{leaf}" for leaf in ("weight", "comfy_quant", *SCALES)),
)  # fmt: skip
JSON_TEXTS = (
    b"", b"null", b"[]", b"{", b"{}", b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"format":null}', b'{"format":"float8_"}',
    b'{"format":"float8_e5m2"}', b'{"format":"nvfp4"}', b'{"format":"' + b"x" * 5000 + b'"}', b'{"format":"\\ud800"}',
    b'{"format":"float8_e4m3fn","num_experts":-1}', b'{"format":"float8_e4m3fn","format":"mxfp8"}', b"\xff\xfe{}", b"\xef\xbb\xbf{}",
    b'{"format":"float8_e4m3fn","full_precision_matrix_mult":"yes"}', b'{"a":' + b"9" * 5000 + b"}", b'{"a":NaN,"b":1e999}', b"\0" * 40,
    b'{"layers":null}', b'{"layers":{"a":1}}', b'{"layers":{"blocks.0.ffn.0":{}}}', b'{"layers":{"blocks.0.ffn.0":{"format":"\\ud800"}}}',
)  # fmt: skip


@dataclass
class Tensor:
    """A tensor as the file holds it: safetensors dtype code, shape, bytes."""

    code: str
    shape: list[int]
    data: bytes


@dataclass
class ModelFile:
    """A file taken apart; ``build`` puts it together with true offsets."""

    tensors: dict[str, Tensor]
    metadata: dict

    def build(self) -> bytes:
        header: dict = {"__metadata__": self.metadata} if self.metadata else {}
        position = 0
        for name, tensor in self.tensors.items():
            end = position + len(tensor.data)
            header[name] = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": [position, end]}
            position = end
        return with_length(dumped(header)) + b"".join(tensor.data for tensor in self.tensors.values())


def dumped(header: object) -> bytes:
    """JSON of any header, lone surrogates included."""
    return json.dumps(header).encode()


def with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@cache
def genuine() -> dict[str, bytes]:
    """One small file of each dialect, by name."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: writer(Path(folder) / name).read_bytes() for name, writer in _writers().items()}


def _writers() -> dict[str, Callable[[Path], Path]]:
    weights, biases = dialects.reference(LAYERS, SHAPE)
    four, _ = dialects.reference(tuple(f"blocks.{number}.fc" for number in range(4)), (16, 64))
    prefixed = {f"model.diffusion_model.{layer}": weight for layer, weight in weights.items()}

    def with_all(write: Callable, **options) -> Callable[[Path], Path]:
        return lambda path: write(path, weights, biases, **options)

    return {
        "bf16": with_all(dialects.plain),
        "fp32": with_all(dialects.plain, dtype=torch.float32),
        "unscaled": with_all(dialects.plain, dtype=dialects.E4M3),
        "checkpoint": lambda path: dialects.plain(path, prefixed, {}),
        "comfy_quant e5m2": with_all(
            dialects.comfy_quant, dtype=dialects.E5M2, settings={"full_precision_matrix_mult": True}
        ),
        "metadata": with_all(dialects.quantization_metadata),
        "scaled_fp8": with_all(dialects.scaled_fp8, input_scale=0.5),
        "fnuz": with_all(dialects.modelopt, dtype=torch.float8_e4m3fnuz),
        "row": with_all(dialects.row_wise),
        "block": with_all(dialects.block_wise, rows=16, columns=16),
        "native": lambda path: dialects.native(path, four, {}),
        "int8 without format": lambda path: dialects.in_format(
            path, four, {}, "int8", {"convrot": True, "convrot_groupsize": 64}
        ),
    }


@cache
def _taken_apart(name: str) -> ModelFile:
    content = genuine()[name]
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__", {})
    tensors = {
        key: Tensor(value["dtype"], value["shape"], data[slice(*value["data_offsets"])])
        for key, value in header.items()
    }
    return ModelFile(tensors, metadata)


def mutated(random: Random) -> bytes:
    """A genuine file after a few mutations: of its parts, of its header, of its bytes, or of several of these."""
    name = random.choice(list(genuine()))
    model = _taken_apart(name)
    model = ModelFile(
        {key: Tensor(t.code, list(t.shape), t.data) for key, t in model.tensors.items()}, dict(model.metadata)
    )
    levels = random.choices(("parts", "header", "bytes"), (6, 3, 2), k=random.choice((1, 1, 1, 2)))
    if "parts" in levels:
        for _ in range(random.choice((1, 1, 2, 3, 5))):
            random.choice(PARTS)(random, model)
    content = model.build()
    if "header" in levels:
        content = _with_other_header(random, content)
    if "bytes" in levels:
        content = _with_other_bytes(random, content)
    return content


def _any_tensor(random: Random, model: ModelFile) -> Tensor:
    if not model.tensors:
        model.tensors["a.weight"] = Tensor("F32", [2, 2], bytes(16))
    return model.tensors[random.choice(list(model.tensors))]


def _any_layer(random: Random, model: ModelFile) -> str:
    return random.choice((*LAYERS, *(name.rpartition(".")[0] for name in model.tensors)))


def _any_name(random: Random, model: ModelFile) -> str:
    name = random.choice(NAMES)
    return name if random.random() < 0.6 else f"{_any_layer(random, model)}.{name.rpartition('.')[2]}"


def _values(random: Random, code: str, count: int, usual: tuple[float, ...]) -> bytes:
    """Numbers, most of them one of the usual, if the dtype is a float of 16 bits or more; else any bytes."""
    if code not in FLOATS:
        return random.randbytes(count * SIZES[code])
    number = random.choice(usual)
    values = [number if random.random() < 0.9 else random.choice(NUMBERS) for _ in range(count)]
    return bytes(torch.tensor(values, dtype=torch.float64).to(FLOATS[code]).view(torch.uint8).tolist())


def _other_name(random: Random, model: ModelFile) -> None:
    """A tensor is renamed, left out or there twice."""
    old, copy = random.choice(list(model.tensors) or ["a"]), _any_tensor(random, model)
    kept = random.random() < 0.4
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if kept or name != old}
    if random.random() < 0.7:
        model.tensors[_any_name(random, model)] = Tensor(copy.code, list(copy.shape), copy.data)


def _other_dtype(random: Random, model: ModelFile) -> None:
    """The same bytes read as another dtype, mostly in a shape that follows from it."""
    tensor = _any_tensor(random, model)
    tensor.code = random.choice(list(SIZES))
    if random.random() < 0.8:
        count = len(tensor.data) // SIZES[tensor.code]
        tensor.data, tensor.shape = tensor.data[: count * SIZES[tensor.code]], _shape_of(random, count)


def _other_shape(random: Random, model: ModelFile) -> None:
    tensor = _any_tensor(random, model)
    tensor.data = random.choice((b"", tensor.data))
    count = len(tensor.data) // SIZES[tensor.code]
    tensor.shape = (
        _shape_of(random, count)
        if random.random() < 0.8
        else [random.choice(EXTREMES) for _ in range(random.randrange(5))]
    )


def _shape_of(random: Random, count: int) -> list[int]:
    """A shape of so many elements; of 65 dimensions now and then."""
    shape = [count]
    for size in random.sample((2, 3, 4, 8, 16, 32), 2):
        if shape[-1] and shape[-1] % size == 0:
            shape[-1:] = [shape[-1] // size, size]
    random.shuffle(shape)
    return shape + [random.choice((0, 1, 7, 2**61))] * (count == 0) + [1] * random.choice((0, 0, 0, 0, 1, 2, 63, 64))


def _other_values(random: Random, model: ModelFile) -> None:
    tensor = _any_tensor(random, model)
    tensor.data = _values(random, tensor.code, len(tensor.data) // SIZES[tensor.code], NUMBERS)


def _huge_values(random: Random, model: ModelFile) -> None:
    """A weight in fp32 or fp64 with values that narrower dtypes do not hold."""
    tensor = _any_tensor(random, model)
    tensor.code, tensor.shape = random.choice(("F32", "F64")), [*SHAPE]
    tensor.data = _values(random, tensor.code, SHAPE[0] * SHAPE[1], NUMBERS)


def _scale(random: Random, model: ModelFile) -> None:
    """A scale beside a weight: of any shape, dtype and value."""
    shape = random.choice(
        ([], [1], [1, 1], [32], [32, 1], [2, 3], [32, 3], [1, 48], [48], [0], [7, 3], [32, 48], [1, 32, 1])
    )
    code = random.choice(("F32", "F32", "BF16", "F16", "F64", "F8_E8M0", "U8", "I32", "C64", "BOOL", "F8_E4M3"))
    data = _values(random, code, prod(shape), (0.5, 0.01, 1.0, *NUMBERS))
    model.tensors[f"{_any_layer(random, model)}.{random.choice(SCALES)}"] = Tensor(code, shape, data)


def _comfy_quant(random: Random, model: ModelFile) -> None:
    text = _any_json(random)
    shape = random.choice(([len(text)], [len(text)], [1, len(text)], [len(text), 1]))
    tensor = Tensor(random.choice(("U8", "U8", "U8", "I8", "F8_E4M3", "BOOL")), shape, text)
    if random.random() < 0.1:
        tensor = random.choice(
            (Tensor("I64", [], b"\xff" * 8), Tensor("U8", [], b"\x05"), Tensor("F32", [1], b"\0\0\xc0\x7f"))
        )
    model.tensors[f"{_any_layer(random, model)}.comfy_quant"] = tensor


def _metadata(random: Random, model: ModelFile) -> None:
    values = ("", "\ud800", "\0", 1, None, {}, "y" * 100_000, *[_any_json(random).decode("utf-8", "replace")] * 7)
    model.metadata[random.choice(("format", "\ud800", "prompt", *["_quantization_metadata"] * 5))] = random.choice(
        values
    )


def _any_json(random: Random) -> bytes:
    """JSON that a reader of settings may meet: garbage of the list, or true settings with bytes changed."""
    if random.random() < 0.6:
        return random.choice(JSON_TEXTS)
    sizes = (64, 16, 256, 0, -1, 3, 1.0, True, None, "64", [64], 10**30)
    settings = {
        key: random.choice(sizes)
        for key in random.sample(("convrot", "convrot_groupsize", "group_size", "num_experts"), 2)
    }
    settings["format"] = random.choice(
        ("float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16", "x")
    )
    text = bytearray(json.dumps(settings).encode())
    for _ in range(random.randrange(3)):
        text[random.randrange(len(text))] = random.randrange(256)
    return bytes(text)


PARTS = (
    *[_other_name, _scale] * 3, *[_other_dtype, _other_shape, _other_values, _comfy_quant, _metadata] * 2, _huge_values,
)  # fmt: skip


def _with_other_header(random: Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    text = random.choice((_entry_changed, _text_changed))(random, text)
    declared = (
        len(text)
        if random.random() < 0.7
        else random.choice((*(n for n in EXTREMES if 0 <= n < 2**64), 10**8, 10**8 + 1, len(text) + 1))
    )
    return declared.to_bytes(8, "little") + text + data


def _entry_changed(random: Random, text: bytes) -> bytes:
    """One field of one entry becomes something else."""
    header = json.loads(text)
    if not header:
        return text
    entry = header[random.choice(list(header))]
    other = header[random.choice(list(header))]
    junk = (
        None,
        True,
        "x",
        [],
        {},
        -1,
        *EXTREMES,
        [0, 10**30],
        [5, 1],
        ["0", "1"],
        [0.0, 4.0],
        *[other.get("data_offsets")] * 3,
    )
    entry[random.choice(("dtype", "shape", "data_offsets", "data_offsets"))] = random.choice(junk)
    return dumped(header)


def _text_changed(random: Random, text: bytes) -> bytes:
    """Other JSON, an entry twice, lists in lists, or characters changed."""
    depth, at = random.choice((10, 950, 100_000)), random.randrange(len(text))
    repeated = b'{"blocks.0.ffn.0.weight":{"dtype":"F32","shape":[],"data_offsets":[0,4]},' + text[1:]
    nested = b'{"a":' + b"[" * depth + b"]" * depth + b"," + text[1:]
    changed = (
        text[:at]
        + random.choice((b"", b'"', b"{", b"]", b",", b"0", b"\\", b"\xff", b"9" * 400))
        + text[at + random.randrange(3) :]
    )
    return random.choice(
        (
            random.choice(JSON_TEXTS),
            repeated,
            nested,
            changed,
            changed,
            b"\xef\xbb\xbf" + text,
            text + b" " * 64,
            text[:-1],
        )
    )


def _with_other_bytes(random: Random, content: bytes) -> bytes:
    result = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(result) or 1)
        gone = random.choice((0, 1, 8, 64, len(result)))
        result[at : at + gone] = random.choice((b"", b"\0" * 4096, random.randbytes(1), random.randbytes(8)))
    return bytes(result)
