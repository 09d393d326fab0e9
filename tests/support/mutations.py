"""Model files damaged in every way a file can be: genuine ones of each dialect, and what a seeded mutator makes of them."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import torch

from . import dialects

SHAPE = (32, 48)
LAYERS = ("blocks.0.ffn.0", "blocks.0.ffn.2")
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "I16": 2,
    "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8, "F4": 1, "X": 1,
}  # fmt: skip
EXTREMES = (-1, 0, 1, 2, 63, 64, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**4000)
NUMBERS = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-38, 3e38, 1e300, 5e-324, 448.0, 65504.0)
NAMES = (
    "", ".", "..", "weight", ".weight", "a.weight", "../../escaped.weight", "/etc/passwd", "C:\\x.weight", "a/b.weight",
    "a\\b.weight", "a\0b.weight", "a\nb.weight", "\x1b[31mred.weight", "\u202egnp.weight", "\ufeff.weight", "\ud800.weight",
    "blocks.².weight", "blocks.٣.weight", f"blocks.{'9' * 5000}.weight", "x" * 70_000, "a." * 2000 + "weight", "%s{0}$x.weight",
    "__metadata__", "__class__.weight", "blocks.0.ffn.0", "blocks.0.ffn.0.weight", "blocks.0.ffn.0.weight_scale",
    "blocks.0.ffn.0.weight_scale_2", "blocks.0.ffn.0.weight_scale_inv", "blocks.0.ffn.0.scale_weight", "blocks.0.ffn.0.scale",
    "blocks.0.ffn.0.scale_input", "blocks.0.ffn.0.input_scale", "blocks.0.ffn.0.comfy_quant", "blocks.0.ffn.2.comfy_quant",
    "blocks.0.ffn.0.weight.weight_scale", "blocks.0.ffn.0.pre_quant_scale", "blocks.0.ffn.0.bias", "scaled_fp8", "a.scaled_fp8",
    "comfy_quant", ".comfy_quant", "weight_scale", "a.k_scale", "blocks.0.ffn.k_scale", "a.lora_down.weight", "a.absmax",
    "a.wscales", "model.diffusion_model.a.weight", "net.weight", "transformer.a.weight", "head.modulation",
)  # fmt: skip
JSON_TEXTS = (
    b"", b"null", b"[]", b"1", b'"x"', b"{", b"{}", b"{" * 50, b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"a":' * 900 + b"1" + b"}" * 900, b'{"format":null}', b'{"format":1}', b'{"format":"float8_e4m3fn","":""}',
    b'{"format":"float8_"}', b'{"format":"float8_e5m2"}', b'{"format":"nvfp4"}', b'{"format":"int8_tensorwise"}',
    b'{"format":"' + b"x" * 5000 + b'"}', b'{"format":"float8_e4m3fn","num_experts":-1}', b'{"format":"../../x"}',
    b'{"format":"float8_e4m3fn","full_precision_matrix_mult":"yes"}', b'{"format":"float8_e4m3fn","format":"mxfp8"}',
    b"1" * 5000, b'{"a":' + b"9" * 5000 + b"}", b'{"a":NaN,"b":Infinity,"c":-Infinity,"d":1e999}', b'"\\ud800"', b"\xff\xfe{}",
    b"\xef\xbb\xbf{}", b"\0" * 40, b'{"layers":null}', b'{"layers":[]}', b'{"layers":{"a":1}}', b'{"layers":{}}',
    b'{"layers":{"blocks.0.ffn.0":{}}}', b'{"layers":{"blocks.0.ffn.0":{"format":"\\ud800"}}}',
    b'{"layers":{"blocks.0.ffn.0":{"format":"float8_e4m3fn","":[1]}}}', b'{"format":"\\ud800"}', b'{"format":"float8_e4m3fn","\\ud800":1}',
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
        "fp16": with_all(dialects.plain, dtype=torch.float16),
        "fp32": with_all(dialects.plain, dtype=torch.float32),
        "unscaled": with_all(dialects.plain, dtype=dialects.E4M3),
        "checkpoint": lambda path: dialects.plain(path, prefixed, {}),
        "comfy_quant": with_all(dialects.comfy_quant),
        "comfy_quant e5m2": with_all(dialects.comfy_quant, dtype=dialects.E5M2, settings={"full_precision_matrix_mult": True}),
        "metadata": with_all(dialects.quantization_metadata),
        "scaled_fp8": with_all(dialects.scaled_fp8, input_scale=0.5),
        "scaled_fp8 e5m2": with_all(dialects.scaled_fp8, dtype=dialects.E5M2, marker=torch.zeros(2)),
        "fnuz": with_all(dialects.modelopt, dtype=torch.float8_e4m3fnuz),
        "modelopt": with_all(dialects.modelopt),
        "row": with_all(dialects.row_wise),
        "flat row": with_all(dialects.row_wise, flat=True, scale_dtype=torch.float32),
        "block": with_all(dialects.block_wise, rows=16, columns=16),
        "block scale": with_all(dialects.block_wise, scale_name="scale", rows=16, columns=16),
        "group": with_all(dialects.block_wise, scale_name="weight_scale", rows=1, columns=16),
        "native": lambda path: dialects.native(path, four, {}),
        "int8": lambda path: dialects.in_format(path, four, {}, "int8"),
        "int8 without format": lambda path: dialects.in_format(path, four, {}, "int8", {"convrot": True, "convrot_groupsize": 64}),
    }


@cache
def _taken_apart(name: str) -> ModelFile:
    content = genuine()[name]
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__", {})
    tensors = {key: Tensor(value["dtype"], value["shape"], data[slice(*value["data_offsets"])]) for key, value in header.items()}
    return ModelFile(tensors, metadata)


def mutated(random: Random) -> bytes:
    """A genuine file after a few mutations: of its parts, of its header, of its bytes, or of several of these."""
    name = random.choice(list(genuine()))
    model = _taken_apart(name)
    model = ModelFile({key: Tensor(t.code, list(t.shape), t.data) for key, t in model.tensors.items()}, dict(model.metadata))
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


def _floats(values: list[float], code: str) -> bytes:
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}[code]
    return bytes(torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.uint8).tolist())


def any_name(random: Random, model: ModelFile) -> str:
    known = list(model.tensors)
    if known and random.random() < 0.4:
        layer = random.choice(known).rpartition(".")[0]
        return f"{layer}.{random.choice(NAMES).rpartition('.')[2]}"
    return random.choice(NAMES)


def _rename(random: Random, model: ModelFile) -> None:
    old, new = random.choice(list(model.tensors) or ["a"]), any_name(random, model)
    model.tensors = {new if name == old else name: tensor for name, tensor in model.tensors.items()}


def _delete(random: Random, model: ModelFile) -> None:
    model.tensors.pop(random.choice(list(model.tensors) or ["a"]), None)


def _duplicate(random: Random, model: ModelFile) -> None:
    tensor = _any_tensor(random, model)
    model.tensors[any_name(random, model)] = Tensor(tensor.code, list(tensor.shape), tensor.data)


def _swap(random: Random, model: ModelFile) -> None:
    first, second = _any_tensor(random, model), _any_tensor(random, model)
    first.code, first.shape, first.data, second.code, second.shape, second.data = (
        second.code, second.shape, second.data, first.code, first.shape, first.data,
    )  # fmt: skip


def _other_dtype(random: Random, model: ModelFile) -> None:
    """The same bytes read as another dtype: one of the same size, or one with the shape that follows from it."""
    tensor = _any_tensor(random, model)
    tensor.code = random.choice(list(SIZES))
    if random.random() < 0.8:
        count = len(tensor.data) // SIZES[tensor.code]
        tensor.data = tensor.data[: count * SIZES[tensor.code]]
        tensor.shape = _shape_of(random, count)


def _other_shape(random: Random, model: ModelFile) -> None:
    tensor = _any_tensor(random, model)
    count = len(tensor.data) // SIZES[tensor.code]
    tensor.shape = _shape_of(random, count) if random.random() < 0.8 else [random.choice(EXTREMES) for _ in range(random.randrange(5))]


def _shape_of(random: Random, count: int) -> list[int]:
    """A shape of so many elements; of 65 dimensions now and then."""
    shape = [count]
    for _ in range(random.randrange(3)):
        divisors = [size for size in (2, 3, 4, 8, 16, 32) if shape[-1] % size == 0 and shape[-1]]
        if divisors:
            size = random.choice(divisors)
            shape[-1:] = [shape[-1] // size, size]
    random.shuffle(shape)
    if count == 0:
        shape += [random.choice((0, 1, 7, 2**31, 2**61))]
    return shape + [1] * random.choice((0, 0, 0, 0, 1, 2, 30, 63, 64))


def _empty(random: Random, model: ModelFile) -> None:
    tensor = _any_tensor(random, model)
    tensor.shape, tensor.data = _shape_of(random, 0), b""


def _other_values(random: Random, model: ModelFile) -> None:
    tensor = _any_tensor(random, model)
    if tensor.code in ("F32", "BF16", "F16", "F64") and random.random() < 0.7:
        count = len(tensor.data) // SIZES[tensor.code]
        chosen = random.choices(NUMBERS, k=random.choice((1, 2, len(NUMBERS))))
        tensor.data = _floats([random.choice(chosen) for _ in range(count)], tensor.code)
    else:
        fill = random.choice((0x00, 0x7F, 0x80, 0xFF, 0x7E, 0xFE, 0x01))
        tensor.data = bytes([fill]) * len(tensor.data) if random.random() < 0.5 else random.randbytes(len(tensor.data))


def _huge_values(random: Random, model: ModelFile) -> None:
    """A weight in fp32 or fp64 with values that narrower dtypes do not hold."""
    tensor = _any_tensor(random, model)
    count, code = min(len(tensor.data), 1536), random.choice(("F32", "F64"))
    tensor.code, tensor.shape = code, [32, 48] if count == 1536 else [count]
    tensor.data = _floats([random.choice(NUMBERS) for _ in range(count)], code)


def _scale(random: Random, model: ModelFile) -> None:
    """A scale beside a weight: of any shape, dtype and value."""
    shape = random.choice(([], [1], [1, 1], [32], [32, 1], [2, 3], [32, 3], [1, 48], [48], [0], [7, 3], [32, 48], [1, 32, 1]))
    code = random.choice(("F32", "F32", "BF16", "F16", "F64", "F8_E8M0", "U8", "I32", "C64", "BOOL", "F8_E4M3"))
    count = 1
    for size in shape:
        count *= size
    if code in ("F32", "BF16", "F16", "F64"):
        usual = random.choice((0.5, 0.01, 1.0, *NUMBERS))
        data = _floats([usual if random.random() < 0.9 else random.choice(NUMBERS) for _ in range(count)], code)
    else:
        data = random.randbytes(count * SIZES[code])
    leaves = ("weight_scale", "weight_scale_inv", "scale_weight", "scale", "input_scale", "scale_input", "weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_codebook", "weight_zeros", "pre_quant_scale")
    layer = random.choice((*LAYERS, *(name.rpartition(".")[0] for name in model.tensors)))
    model.tensors[f"{layer}.{random.choice(leaves)}"] = Tensor(code, shape, data)


def _comfy_quant(random: Random, model: ModelFile) -> None:
    text = any_json(random)
    code = random.choice(("U8", "U8", "U8", "I8", "F8_E4M3", "BOOL"))
    shape = random.choice(([len(text)], [len(text)], [1, len(text)], [len(text), 1]))
    layer = random.choice((*LAYERS, *(name.rpartition(".")[0] for name in model.tensors)))
    if random.random() < 0.1:
        code, shape, text = random.choice((("I64", [], b"\xff" * 8), ("U8", [], b"\x05"), ("F32", [1], b"\0\0\xc0\x7f"), ("I32", [2], b"\xff" * 8)))
    model.tensors[f"{layer}.comfy_quant"] = Tensor(code, list(shape), text)


def _quantization_metadata(random: Random, model: ModelFile) -> None:
    model.metadata["_quantization_metadata"] = any_json(random).decode("utf-8", "replace")


def any_json(random: Random) -> bytes:
    """JSON that a reader of settings may meet: garbage of the list, or a true one with bytes changed."""
    if random.random() < 0.6:
        return random.choice(JSON_TEXTS)
    text = bytearray(json.dumps(_settings(random)).encode())
    for _ in range(random.randrange(3)):
        text[random.randrange(len(text))] = random.randrange(256)
    return bytes(text)


def _settings(random: Random) -> dict:
    format = random.choice(("float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16", "x"))
    sizes = (64, 16, 4, 256, 1024, 0, -1, 3, 1.0, True, None, "64", [64], 10**30)
    more = {"convrot": random.choice((True, False, 1, None)), "convrot_groupsize": random.choice(sizes), "group_size": random.choice(sizes)}
    keys = random.sample(list(more), random.randrange(4))
    settings = {key: more[key] for key in keys}
    nested = random.choice(({}, {"params": settings}, {"num_experts": random.choice((1, 2, None))}))
    return {"format": format} | nested | ({} if "params" in nested else settings)


def _metadata(random: Random, model: ModelFile) -> None:
    values = ("", "x", "\ud800", "\0", "pt", 1, None, [], {}, True, "y" * 100_000)
    model.metadata[random.choice(("format", "", "\ud800", "prompt", "_quantization_metadata"))] = random.choice(values)


def _weights_only(random: Random, model: ModelFile) -> None:
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if name.endswith("weight")}


def _in_other_order(random: Random, model: ModelFile) -> None:
    items = list(model.tensors.items())
    random.shuffle(items)
    model.tensors = dict(items)


PARTS = (
    _rename, _delete, _duplicate, _swap, _other_dtype, _other_dtype, _other_shape, _empty, _other_values, _other_values,
    _huge_values, _scale, _scale, _scale, _comfy_quant, _comfy_quant, _quantization_metadata, _metadata, _weights_only,
    _in_other_order,
)  # fmt: skip


def _with_other_header(random: Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    text = random.choice(HEADERS)(random, text)
    declared = len(text) if random.random() < 0.7 else random.choice((*(n for n in EXTREMES if 0 <= n < 2**64), 10**8, 10**8 + 1, len(text) + 1))
    return declared.to_bytes(8, "little") + text + data


def _entry_changed(random: Random, text: bytes) -> bytes:
    """One field of one entry becomes something else."""
    header = json.loads(text)
    if not header:
        return text
    entry = header[random.choice(list(header))]
    junk = random.choice((None, True, 1.5, "x", [], {}, [[]], -1, *EXTREMES, [0, 10**30], [5, 1], ["0", "1"], [0.0, 4.0], [True, 4]))
    entry[random.choice(("dtype", "shape", "data_offsets", "extra"))] = junk
    return dumped(header)


def _offsets_changed(random: Random, text: bytes) -> bytes:
    header = json.loads(text)
    entries = [value for value in header.values() if "data_offsets" in value]
    if not entries:
        return text
    entry = random.choice(entries)
    how = random.randrange(4)
    if how == 0:
        entry["data_offsets"] = random.choice(entries)["data_offsets"]
    elif how == 1:
        entry["data_offsets"] = [offset + random.choice((-8, -1, 1, 8)) for offset in entry["data_offsets"]]
    elif how == 2:
        entry["data_offsets"] = entry["data_offsets"][::-1]
    else:
        entry["data_offsets"][random.randrange(2)] = random.choice(EXTREMES)
    return dumped(header)


def _characters_changed(random: Random, text: bytes) -> bytes:
    text = bytearray(text)
    for _ in range(random.randrange(1, 5)):
        position = random.randrange(len(text))
        text[position : position + random.randrange(3)] = random.choice((b"", b'"', b"{", b"]", b",", b"0", b"\\", b"\xff", b"9" * 400))
    return bytes(text)


def _key_repeated(random: Random, text: bytes) -> bytes:
    return b'{"blocks.0.ffn.0.weight":{"dtype":"F32","shape":[],"data_offsets":[0,4]},' + text[1:]


def _nested(random: Random, text: bytes) -> bytes:
    depth = random.choice((10, 500, 950, 1000, 5000, 100_000))
    return b'{"a":' + b"[" * depth + b"]" * depth + b"," + text[1:]


def _other_json(random: Random, text: bytes) -> bytes:
    return random.choice(JSON_TEXTS)


def _padded(random: Random, text: bytes) -> bytes:
    return random.choice((text + b" " * 64, b" " + text, b"\xef\xbb\xbf" + text, text + b"\0", text + text, text[:-1]))


HEADERS = (_entry_changed, _entry_changed, _offsets_changed, _characters_changed, _key_repeated, _nested, _other_json, _padded)


def _with_other_bytes(random: Random, content: bytes) -> bytes:
    result = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(result) or 1)
        how = random.randrange(6)
        if how == 0 and result:
            result[at % len(result)] ^= 1 << random.randrange(8)
        elif how == 1:
            del result[at:]
        elif how == 2:
            del result[at : at + random.randrange(1, 64)]
        elif how == 3:
            result[at:at] = random.randbytes(random.randrange(1, 64))
        elif how == 4:
            result += random.choice((b"\0", b"\0" * 4096, random.choice(list(genuine().values()))))
        else:
            result[at : at + 8] = random.randbytes(8)
    return bytes(result)


RULE_WORDS = (
    "blocks.*", "*", "re:", "re:(", "re:.*", "re:[a-z]+\\.\\d", "re:\\1", "re:(?P<a>x)(?P=a)", "re:*", "class:Linear", "class:", "class:[",
    "storage=", "storage=bf16", "storage=fp8_e4m3fn", "storage=as_file", "compute=fp16_safe", "compute=x", "stream=fp32",
    "accumulation=fp16", "=", "==", "a=b", "#", "# why", "\0", "\x85", "\u2028", "\ufeff", "\ud800", "\u0130=\u0131", "STORAGE=BF16",
    "[", "[!", "]", "[a-", "{", "\\", "%", "x" * 3000, "*" * 300, "?" * 300, "\t", "\r", "\x1c", " = ", "blocks.0.ffn.0",
)  # fmt: skip


def rules_text(random: Random) -> str:
    """Lines that look like rules, and lines that do not."""
    lines = (" ".join(random.choices(RULE_WORDS, k=random.randrange(6))) for _ in range(random.randrange(8)))
    return random.choice(("\n", "\r\n", "\x0b", "\n\n")).join(lines)
