"""Safetensors files: mapped reading, sharded sets, damaged files, and writing that is whole or not at all."""

import errno
import io
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.files import atomic_write, safetensors_file
from halfsafe.precision.files.safetensors_file import open_checkpoint, write_safetensors
from halfsafe.precision.files.safetensors_header import CODE_OF, CODES, TORCH_DTYPES, TensorSpec
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[3]


def specs_of(tensors):
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(path, tensors, metadata=None):
    write_safetensors(path, specs_of(tensors), tensors.items(), metadata or {})


def header_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), start=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def same_bits(left, right):
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.fixture
def every_dtype():
    tensors = {}
    for dtype in TORCH_DTYPES.values():
        raw = torch.arange(3 * dtype.itemsize, dtype=torch.uint8) % 2
        tensors[f"t.{dtype}"] = raw.view(dtype)
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "matrix": torch.randn(5, 7)}


def test_reads_what_the_safetensors_library_writes(tmp_path, every_dtype):
    names = {code for code in CODES if code not in ("F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "C64")}
    written = {name: tensor for name, tensor in every_dtype.items() if CODE_OF[tensor.dtype] in names}
    save_file(written, tmp_path / "a.safetensors", {"format": "pt"})
    file = open_checkpoint(tmp_path / "a.safetensors")
    assert file.metadata == {"format": "pt"} and set(file) == set(written) and len(file) == len(written)
    for name, tensor in written.items():
        assert file[name].dtype == tensor.dtype and file[name].shape == tensor.shape
        assert same_bits(file[name], tensor)


def test_the_safetensors_library_reads_what_we_write(tmp_path, every_dtype):
    write(tmp_path / "a.safetensors", every_dtype, {"format": "pt", "name": "é"})
    readable = {name: t for name, t in every_dtype.items() if t.dtype not in (torch.complex64, torch.float8_e8m0fnu)}
    write(tmp_path / "b.safetensors", readable)
    loaded = load_file(tmp_path / "b.safetensors")
    assert all(same_bits(loaded[name], tensor) for name, tensor in readable.items())
    file = open_checkpoint(tmp_path / "a.safetensors")
    assert file.metadata["name"] == "é"
    assert all(
        same_bits(file[name], tensor) and file[name].shape == tensor.shape for name, tensor in every_dtype.items()
    )


def test_every_tensor_is_aligned(tmp_path):
    write(
        tmp_path / "a.safetensors",
        {"odd": torch.ones(27, dtype=torch.uint8), "wide": torch.ones(4), "half": torch.ones(3).half()},
    )
    file = open_checkpoint(tmp_path / "a.safetensors")
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in file.values())


def test_views_share_the_mapping_and_writes_never_reach_the_file(tmp_path):
    write(tmp_path / "a.safetensors", {"a": torch.zeros(4096)})
    file = open_checkpoint(tmp_path / "a.safetensors")
    assert file["a"].data_ptr() == file["a"].data_ptr()
    file["a"].fill_(7)
    assert open_checkpoint(tmp_path / "a.safetensors")["a"].sum() == 0


def test_released_pages_read_the_same_again(tmp_path):
    write(tmp_path / "a.safetensors", {"a": torch.arange(100000.0), "b": torch.ones(3)})
    file = open_checkpoint(tmp_path / "a.safetensors")
    before = file["a"].clone()
    file.release("a")
    file.release("b")
    assert torch.equal(file["a"], before)


# sharded sets


def shards(folder, indexed=3, suffix=".safetensors"):
    names = [f"model-{number:05d}-of-00003{suffix}" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        save_file({f"layer.{number}.weight": torch.full((2, 2), float(number))}, folder / name, {"format": "pt"})
    table = {f"layer.{number}.weight": name for number, name in enumerate(names[:indexed])}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}), encoding="utf-8-sig")
    return names


@pytest.mark.parametrize("suffix", [".safetensors", ".SAFETENSORS"])
def test_any_shard_opens_the_whole_set(tmp_path, suffix):
    for name in shards(tmp_path, suffix=suffix):
        file = open_checkpoint(tmp_path / name)
        assert [tensor[0, 0].item() for tensor in file.values()] == [0, 1, 2]
        assert len(file.files) == 3 and file.metadata == {"format": "pt"}


@pytest.mark.parametrize("indexed", [3, 2])
def test_a_set_is_whole_or_its_missing_part_is_named(tmp_path, indexed):
    names, index = shards(tmp_path, indexed), tmp_path / "model.safetensors.index.json"
    assert len(open_checkpoint(index)) == 3
    (tmp_path / names[2]).unlink()
    for opened in (index, tmp_path / names[0]):
        with pytest.raises(CheckpointError, match=rf"one file of the set is missing: {names[2]}.*Download all parts"):
            open_checkpoint(opened)


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "..", "a\\b", "C:x", "", 5])
def test_an_index_cannot_leave_its_folder(tmp_path, shard):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    save_file({"a": torch.ones(1)}, tmp_path.parent / "a.safetensors")
    with pytest.raises(CheckpointError, match="plain file name"):
        open_checkpoint(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 10000])
def test_a_broken_index_is_an_error(tmp_path, text):
    (tmp_path / "m.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"m\.index\.json: (its text is|an index without)"):
        open_checkpoint(tmp_path / "m.index.json")


def test_index_and_shards_must_agree(tmp_path):
    shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text(encoding="utf-8-sig"))
    table["weight_map"]["layer.9.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"layer\.9\.weight"):
        open_checkpoint(index)
    save_file({"layer.0.weight": torch.ones(1)}, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"layer\.0\.weight.*also in"):
        open_checkpoint(index)


# damaged files

DAMAGED = {
    "empty": (b"", "empty"),
    "tiny": (b"\1\2\3", "only 3 bytes"),
    "html": (b"<!DOCTYPE html><html>...", "web page"),
    "zip": (b"PK\x03\x04\0\0\0\0\0\0" + b"\0" * 40, r"\.ckpt, \.pt"),
    "pickle": (b"\x80\x02}q\0X\x0e\0\0\0state_dict", "pickle"),
    "gguf": (b"GGUF\x03\0\0\0" + b"\0" * 40, "Load it with ComfyUI-GGUF and connect its MODEL to any Halfsafe node"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n", "git-LFS"),
    "text": (b"Access to model black-forest-labs/FLUX is restricted", "Access to model"),
    "huge header": ((1 << 60).to_bytes(8, "little") + b"{" + b"\0" * 20, "header of 1152921504606846976"),
    "header past the end": ((1000).to_bytes(8, "little") + b"{}", "998 bytes of the header"),
    "no header": (b"\0" * 8, "only 8 bytes"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_files_of_other_kinds_are_named(tmp_path, kind):
    content, expected = DAMAGED[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert str(path) in refused_at_once(path, expected, 0)


@contextmanager
def bytes_asked():
    """How many bytes each read of a safetensors file's header asks for, met or not."""
    asked, open_regular = [], safetensors_file.open_regular

    class Watched(io.BufferedReader):
        def read(self, size=-1):
            asked.append(size if size >= 0 else Path(self.raw.name).stat().st_size)
            return super().read(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "open_regular", lambda path: Watched(open_regular(path).detach()))
        yield asked


def refused_at_once(path, expected, header):
    """Open a file that is refused with little work, whatever lengths and shapes it claims. Returns the error's text."""
    with bytes_asked() as asked, pytest.raises(CheckpointError, match=expected) as error:
        open_checkpoint(path)
    assert sum(asked) <= 512 + header
    return str(error.value)


def test_a_header_whose_length_looks_like_a_pickle_is_still_read(tmp_path):
    text = json.dumps({"a": entry()}).encode().ljust(0x280)
    assert header_file(tmp_path / "a.safetensors", text, b"\0" * 8).read_bytes()[:2] == b"\x80\x02"
    assert open_checkpoint(tmp_path / "a.safetensors")["a"].shape == (2,)


HEADERS = {
    "not json": (b"{not json}", b"", "damaged .*JSON"),
    "deep": (b'{"a":' + b"[" * 50000, b"", "JSON"),
    "huge number": (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 6000 + b'], "data_offsets": [0, 4]}}', b"", "JSON"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "expected a string"),
    "no entry": ({"a": 5}, b"", "damaged"),
    "missing key": ({"a": {"dtype": "F32", "shape": [1]}}, b"", "missing field"),
    "negative": ({"a": entry(shape=[-2])}, b"\0" * 8, "-8 bytes, the file holds 8"),
    "float": ({"a": entry(shape=[2.0])}, b"\0" * 8, "damaged.*floating"),
    "surrogate": (
        b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        b"\0" * 8,
        "hex escape|shown",
    ),
    "utf-16": (json.dumps({"a": entry()}).encode("utf-16-le"), b"\0" * 8, "damaged"),
    "escape": ({"a\x1b[31m": entry()}, b"\0" * 8, "cannot be shown"),
    "two lines": ({"a\nb": entry()}, b"\0" * 8, "cannot be shown"),
    "right to left": ({"a\u202eb": entry()}, b"\0" * 8, "cannot be shown"),
    "long name": ({"a" * 70_000: entry()}, b"\0" * 8, "too long"),
    "dtype": ({"a": entry("Q4_K")}, b"\0" * 8, "Q4_K"),
    "span": ({"a": entry(shape=[3])}, b"\0" * 8, "12 bytes, the file holds 8"),
    "backwards": ({"a": entry(start=8, end=0)}, b"\0" * 8, "the file holds -8"),
    "huge shape": ({"a": entry(shape=[0, 1 << 62, 1 << 62], end=0)}, b"", "impossible"),
    "dimensions": ({"a": entry(shape=[1] * 65, end=4)}, b"\0" * 4, "impossible"),
    "truncated": ({"a": entry(shape=[1000], end=4000)}, b"\0" * 1000, "3000 of"),
    "overlap": ({"a": entry(), "b": entry(start=4, end=12)}, b"\0" * 12, "damaged.*`b`"),
    "hole": ({"a": entry(), "b": entry(start=12, end=20)}, b"\0" * 20, "damaged.*`b`"),
    "late start": ({"a": entry(start=4, end=12)}, b"\0" * 12, "damaged.*`a`"),
    "trailing": ({"a": entry()}, b"\0" * 9, "damaged"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_damaged_headers_are_errors_that_name_the_file(tmp_path, kind):
    header, data, expected = HEADERS[kind]
    path = header_file(tmp_path / "model.safetensors", header, data)
    text = refused_at_once(path, expected, path.stat().st_size - 8 - len(data))
    assert str(path) in text
    text.encode()


def test_header_order_may_differ_from_file_order(tmp_path):
    data = torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes()
    path = header_file(tmp_path / "a.safetensors", {"b": entry(start=8, end=16), "a": entry()}, data)
    assert [tensor.tolist() for tensor in open_checkpoint(path).values()] == [[1, 2], [3, 4]]


def test_folders_missing_files_and_impossible_names(tmp_path):
    for path, expected in ((tmp_path, "folder"), (tmp_path / "no", "opened"), (f"{tmp_path}/a\0b", "opened")):
        with pytest.raises(CheckpointError, match=expected):
            open_checkpoint(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="regular"):
        open_checkpoint(tmp_path / "pipe.safetensors")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cuts no file that is mapped")
def test_a_file_that_was_cut_since_it_was_opened_is_told_and_not_read(tmp_path):
    save_file({"a": torch.ones(100_000), "b": torch.ones(100_000)}, tmp_path / "a.safetensors")
    file = open_checkpoint(tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", 500_000)
    for use in (lambda: file["b"].sum(), file.require_whole):
        with pytest.raises(CheckpointError, match=r"a\.safetensors: truncated to 500000 bytes while it was read"):
            use()


# writing


def test_tensors_may_come_in_any_order(tmp_path):
    tensors = {"a": torch.ones(1000), "b": torch.zeros(5).half(), "c": torch.ones(7, dtype=torch.uint8)}
    backwards = list(tensors.items())[::-1]
    write_safetensors(tmp_path / "a.safetensors", specs_of(tensors), backwards, {})
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(tmp_path / "a.safetensors").items())


@pytest.mark.parametrize("given", [{}, {"a": torch.ones(3)}, {"a": torch.ones(2).half()}, {"b": torch.ones(2)}])
def test_other_tensors_than_announced_leave_no_file(tmp_path, given):
    with pytest.raises(ValueError, match="announced"):
        write_safetensors(tmp_path / "a.safetensors", [TensorSpec("a", torch.float32, (2,))], given.items(), {})
    assert list(tmp_path.iterdir()) == []


def test_replaces_the_old_file_whole(tmp_path):
    path = tmp_path / "a.safetensors"
    for value in (1.0, 2.0):
        write(path, {"a": torch.full((3,), value)})
        assert load_file(path)["a"].tolist() == [value] * 3
    assert list(tmp_path.iterdir()) == [path]


def test_writes_through_a_symlink(tmp_path):
    real, link = tmp_path / "real.safetensors", tmp_path / "link.safetensors"
    write(real, {"a": torch.ones(1)})
    link.symlink_to(real)
    write(link, {"a": torch.zeros(1)})
    assert link.is_symlink() and load_file(real)["a"].item() == 0


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError()]
)
def test_a_failure_half_way_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, failure):
    path = tmp_path / "a.safetensors"
    write(path, {"a": torch.ones(4)})
    before = path.read_bytes()
    original = safetensors_file._write_tensor

    def failing(file, position, tensor):
        if tensor.sum() == 0:
            raise failure
        original(file, position, tensor)

    monkeypatch.setattr(safetensors_file, "_write_tensor", failing)
    expected = CheckpointError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected) as error:
        write(path, {"a": torch.ones(4), "b": torch.zeros(4)})
    if expected is CheckpointError:
        assert str(path) in str(error.value) and "No space left" in str(error.value)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_too_small_a_disk_is_told_before_the_first_byte(tmp_path, monkeypatch):
    usage = atomic_write.shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(atomic_write.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(safetensors_file, "replacing", None)
    with pytest.raises(CheckpointError, match=r"976\.56 KiB free, 38\.15 MiB are needed"):
        write(tmp_path / "a.safetensors", {"a": torch.ones(10_000_000)})
