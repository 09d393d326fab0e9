"""GGUF files: tensors as the library and ComfyUI-GGUF lay them out, and files that are damaged, split or of other models."""

import subprocess
import sys
import textwrap
from random import Random

import gguf
import numpy as np
import pytest
import torch
from halfsafe.precision.dtypes import name_of
from halfsafe.precision.errors import CheckpointError
from halfsafe.precision.files import gguf_file
from halfsafe.precision.files.gguf_file import Packed, open_gguf
from safetensors.torch import save_file
from support import gguf_files
from support.shipped import ROOT

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAME = "blocks.0.ffn.0.weight"
WEIGHT = torch.linspace(-1, 1, 24 * 64).view(24, 64)


def tensors(*kinds):
    return {f"blocks.{kind}.weight": (kind, gguf_files.quantized(WEIGHT, kind)) for kind in kinds}


@pytest.fixture
def path(tmp_path):
    return gguf_files.write(tmp_path / "in.gguf", tensors("F32", "Q8_0", "BF16"))


def refused(path, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_tensors_are_mapped_in_their_own_dtype(tmp_path, kind):
    file = open_gguf(gguf_files.write(tmp_path / "in.gguf", tensors(kind)))
    (name,) = file
    assert file.packed == {} and file.dtype_name(name) == name_of(PLAIN[kind]) and file.shape(name) == (24, 64)
    assert torch.equal(file[name], WEIGHT.to(PLAIN[kind])) and file[name].dtype == PLAIN[kind]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantized_tensors_are_bytes_with_a_type_and_a_shape(tmp_path, kind):
    written = tensors(kind)
    file = open_gguf(gguf_files.write(tmp_path / "in.gguf", written))
    (name,) = file
    assert file.packed == {name: Packed(kind, (24, 64))} and file.dtype_name(name) == kind and file.shape(name) == (24, 64)
    assert file[name].numpy().tobytes() == written[name][1].tobytes()


def test_tensors_of_every_dimension_have_their_dimensions_in_torchs_order(tmp_path):
    shapes = {"a.bias": (7,), "b.weight": (5, 3), "c.weight": (2, 3, 4), "d.weight": (2, 3, 4, 5), "e.weight": (6, 2, 1, 2, 2)}
    written = {name: ("F32", np.random.default_rng(0).random(shape, np.float32)) for name, shape in shapes.items()}
    file = open_gguf(gguf_files.write(tmp_path / "in.gguf", written))
    for name, (_, data) in written.items():
        assert torch.equal(file[name], torch.from_numpy(data))


def reshaped(shape, name=NAME):
    return lambda writer: writer.add_array(f"comfy.gguf.orig_shape.{name}", shape)


def test_a_reshaped_tensor_has_its_own_shape_again(tmp_path):
    written = {NAME: ("Q8_0", gguf_files.quantized(WEIGHT.reshape(6, 256), "Q8_0")), "a.weight": ("F16", WEIGHT.half().numpy())}

    def shapes(writer):
        reshaped((4, 8, 6, 8))(writer)
        reshaped((24, 4, 4, 4), "a.weight")(writer)

    file = open_gguf(gguf_files.write(tmp_path / "in.gguf", written, fields=shapes))
    assert file.packed[NAME] == Packed("Q8_0", (4, 8, 6, 8))
    assert torch.equal(file["a.weight"], WEIGHT.half().view(24, 4, 4, 4))


@pytest.mark.parametrize("shape", [(24, 63), (-24, -64), (0,)])
def test_a_shape_that_does_not_fit_the_tensor_is_refused(tmp_path, shape):
    path = gguf_files.write(tmp_path / "in.gguf", {NAME: ("F32", WEIGHT.numpy())}, fields=reshaped(shape))
    assert refused(path, r"1536 values, but its metadata says").tensor == NAME


def test_texts_of_the_metadata_are_kept(tmp_path):
    def texts(writer):
        writer.add_name("A model")
        writer.add_string("config", '{"a": 1}')
        writer.add_uint32("number", 7)

    file = open_gguf(gguf_files.write(tmp_path / "in.gguf", tensors("F32"), fields=texts))
    assert file.metadata == {"general.architecture": "wan", "general.name": "A model", "config": '{"a": 1}'}


def test_an_old_file_has_no_architecture(tmp_path):
    file = open_gguf(gguf_files.write(tmp_path / "in.gguf", tensors("F32"), arch=None))
    assert file.metadata == {} and len(file) == 1


def test_without_the_library_the_error_has_the_line_that_installs_it(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert f"{sys.executable} -m pip install gguf" in refused(path, "Python package gguf").advice


def test_the_library_is_imported_for_gguf_files_only(tmp_path, path):
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "in.safetensors")
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        import conftest
        from halfsafe.precision.files import gguf_file
        from halfsafe.precision.commands.inspect import inspect_file
        inspect_file({str(tmp_path / "in.safetensors")!r})
        before = "gguf" in sys.modules
        gguf_file.open_gguf(gguf_file.Path({str(path)!r}))
        print(before, "gguf" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("architecture", ["llama", "t5", "t5encoder", "qwen2vl", "gemma3", "clip"])
def test_text_encoders_are_refused_as_such(tmp_path, architecture):
    path = gguf_files.write(tmp_path / "in.gguf", tensors("F32"), arch=architecture)
    refused(path, rf"text encoder \(architecture {architecture}\), not a diffusion model.*CLIPLoader \(GGUF\)")


@pytest.mark.parametrize("architecture", ["flux", "sd1", "sdxl", "sd3", "aura", "hidream", "cosmos", "ltxv", "hyvid", "wan", "lumina2", "qwen_image", "pig", "new"])
def test_diffusion_models_are_not_refused(tmp_path, architecture):
    assert len(open_gguf(gguf_files.write(tmp_path / "in.gguf", tensors("F32"), arch=architecture))) == 1


def test_parts_of_a_split_file_are_refused(tmp_path):
    whole = {f"blocks.{number}.weight": ("F32", WEIGHT.numpy()) for number in range(4)}
    gguf_files.write(tmp_path / "m.gguf", whole, split_max_tensors=2)
    first = tmp_path / "m-00001-of-00002.gguf"
    refused(first, r"a part of a split.*llama-gguf-split --merge")
    refused(first.rename(tmp_path / "renamed.gguf"), r"one of 2 parts of a split.*llama-gguf-split --merge")


def test_a_file_named_as_the_only_part_is_whole(path):
    assert len(open_gguf(path.rename(path.with_name("m-00001-of-00001.gguf")))) == 3


def test_a_big_endian_file_is_refused(tmp_path):
    path = gguf_files.write(tmp_path / "in.gguf", {NAME: ("F32", WEIGHT.numpy())}, endianess=gguf.GGUFEndian.BIG)
    refused(path, "big-endian")


@pytest.mark.parametrize("version", [1, 4, 77])
def test_an_unknown_version_is_refused(path, version):
    content = path.read_bytes()
    path.write_bytes(content[:4] + version.to_bytes(4, "little") + content[8:])
    refused(path, f"cannot be read by gguf .*version {version}.*pip install --upgrade gguf")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty"),
        (b"<html><head>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1", "git-LFS pointer"),
        (b"\x40\0\0\0\0\0\0\0{}" + b" " * 60, r"named \.gguf, but a safetensors file.*ends in \.safetensors"),
        (b"\0\x06\0\0\0\0\0\0{}" + b" " * 3000, r"named \.gguf, but a safetensors file.*ends in \.safetensors"),
        (b"PK\x03\x04" + b"\0" * 40, "zip archive"),
    ],
)
def test_other_files_with_this_ending_are_told(tmp_path, content, match):
    path = tmp_path / "in.gguf"
    path.write_bytes(content)
    refused(path, match)


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    refused(tmp_path / "none.gguf", "cannot be opened")
    refused(tmp_path, "a folder")


def test_a_file_truncated_anywhere_is_refused(path):
    content = path.read_bytes()
    data = open_gguf(path)
    first = min(entry.start for entry in data.entries.values())
    last = max(entry.end for entry in data.entries.values())
    for length in [*range(4, first, 3), first, first + 1, last - 1]:
        path.write_bytes(content[:length])
        error = refused(path, "truncated")
        if length >= first:
            assert f"{last - length} bytes of the file are missing" in str(error) and error.tensor in data


def _changed(path, old: bytes, new: bytes):
    content = path.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


def _info(path, name):
    """The bytes of a tensor's entry from its name on: dimensions, their number, type, offset."""
    reader = gguf.GGUFReader(path)
    (tensor,) = [tensor for tensor in reader.tensors if tensor.name == name]
    return b"".join(part.tobytes() for part in tensor.field.parts[1:])


def with_entry(path, name, dimensions=None, kind=None, offset=None):
    """The file with other numbers in a tensor's entry."""
    old = _info(path, name)
    head, rest = old[: len(name) + 4], old[len(name) + 4 :]
    known = [int.from_bytes(rest[at : at + 8], "little") for at in range(0, len(rest) - 12, 8)]
    sizes = b"".join(size.to_bytes(8, "little") for size in dimensions or known)
    tail = (kind.to_bytes(4, "little") if kind is not None else rest[-12:-8]) + (offset.to_bytes(8, "little") if offset is not None else rest[-8:])
    return _changed(path, old, head + sizes + tail)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": 99}, r"type 99 of GGML, which gguf .* does not know.*pip install --upgrade gguf"),
        ({"dimensions": [1 << 62, 1 << 62]}, "shape is impossible"),
        ({"dimensions": [1 << 32, 1 << 32]}, "shape is impossible"),
        ({"dimensions": [1 << 40, 24]}, "truncated: .* bytes of the file are missing"),
        ({"dimensions": [65, 24]}, "multiple of its 32"),
        ({"offset": 1 << 50}, "truncated: .* bytes of the file are missing"),
        ({"offset": (1 << 64) - 1}, "truncated"),
        ({"offset": 0}, "overlaps another tensor"),
    ],
)
def test_an_entry_that_cannot_be_right_is_refused_with_its_tensor(path, change, match):
    error = refused(with_entry(path, "blocks.Q8_0.weight", **change), match)
    assert error.tensor and error.tensor.startswith("blocks.")


def test_rows_that_are_no_whole_blocks_are_refused(path):
    error = refused(with_entry(path, "blocks.Q8_0.weight", dimensions=[48, 32]), "Q8_0 with rows of 48 values, which are no multiple of its 32")
    assert error.tensor == "blocks.Q8_0.weight"


def test_two_tensors_of_one_name_are_refused(tmp_path):
    path = gguf_files.write(tmp_path / "in.gguf", {"a.weight": ("F32", WEIGHT.numpy()), "b.weight": ("F32", WEIGHT.numpy())})
    refused(_changed(path, b"b.weight", b"a.weight"), "cannot be read by gguf .*duplicated")


def test_a_name_that_cannot_be_shown_is_refused(tmp_path):
    path = gguf_files.write(tmp_path / "in.gguf", {"red.weight": ("F32", WEIGHT.numpy())})
    refused(_changed(path, b"red.weight", b"\x1b[31weight"), "cannot be shown")


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_metadata_that_claims_more_items_than_there_are_is_refused_at_once(tmp_path, length):
    path = gguf_files.write(tmp_path / "in.gguf", tensors("F32"), fields=lambda writer: writer.add_array("many", [1, 2, 3]))
    key = b"many" + (9).to_bytes(4, "little") + (5).to_bytes(4, "little")
    refused(_changed(path, key + (3).to_bytes(8, "little"), key + length.to_bytes(8, "little")), "truncated in its header")


def test_metadata_of_too_many_items_is_refused(tmp_path, monkeypatch):
    path = gguf_files.write(tmp_path / "in.gguf", tensors("F32"), fields=lambda writer: writer.add_array("many", list(range(1000))))
    assert len(open_gguf(path)) == 1
    monkeypatch.setattr(gguf_file, "_MOST_READS", 500)
    refused(path, "more than 500 items")


def test_headers_damaged_at_random_are_read_or_refused(tmp_path, path):
    content = path.read_bytes()
    header = min(entry.start for entry in open_gguf(path).entries.values())
    outcomes = set()
    for case in range(400):
        random = Random(case)
        damaged = bytearray(content)
        for _ in range(random.choice((1, 1, 2, 8))):
            at = random.randrange(4, header)
            damaged[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, damaged[at] ^ 1 << random.randrange(8), random.randrange(256)))
        path.write_bytes(damaged)
        try:
            file = open_gguf(path)
        except CheckpointError as error:
            assert str(path) in str(error)
            outcomes.add("refused")
        else:
            for name in file:
                assert file[name].numel() == np.prod(file.entries[name].shape)
            outcomes.add("read")
    assert outcomes == {"refused", "read"}


SDXL = {"label_emb.0.0.weight": (4, 8), "a.proj_in.weight": (8, 8, 1, 1), "a.proj_out.weight": (8, 8, 1, 1), "a.skip.weight": (8, 4, 1, 1)}


@pytest.mark.parametrize(("arch", "names", "dimensions"), [(None, SDXL, 2), ("sdxl", SDXL, 4), (None, [*SDXL][1:], 4)])
def test_linear_layers_of_an_old_sdxl_lose_their_dimensions_of_one(tmp_path, arch, names, dimensions):
    written = {name: ("F16", np.ones(SDXL[name], np.float16)) for name in names}
    file = open_gguf(gguf_files.write(tmp_path / "in.gguf", written, arch=arch))
    shapes = {name: file[name].dim() for name in names if name.startswith("a.")}
    assert shapes == {"a.proj_in.weight": dimensions, "a.proj_out.weight": dimensions, "a.skip.weight": 4}
