"""Commands on GGUF files: what they show of the types, and what becomes of the values."""

import hashlib
import json
from random import Random

import numpy as np
import pytest
import torch
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file, scan_file
from halfsafe.precision.commands.plan import plan_file
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.errors import CheckpointError, NonFiniteWeight
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.files.tensor_file import fingerprint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file
from support import fuzz_targets, gguf_files, tiny_models
from support.measures import relative_error

KINDS = ("Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "Q5_1")
NO_RULES = rules_from("", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    tiny_models.wan(folder / "wan.safetensors", blocks=1, text_dim=512)
    gguf_files.of_model(folder / "wan.safetensors", folder / "wan.gguf", KINDS, folder / "values.safetensors")
    return folder


@pytest.fixture(scope="module")
def source(folder):
    return folder / "wan.gguf"


@pytest.fixture(scope="module")
def values(folder):
    return load_file(folder / "values.safetensors")


def convert(source, target, storage, rules=NO_RULES, progress=None):
    summary = convert_file(source, target, storage, rules, progress)
    file = open_checkpoint(target)
    return summary, read_checkpoint(file, file.metadata, target)


def test_inspect_shows_types_parameters_and_model(source, values):
    found = inspect_file(source)
    assert found.dialect == "GGUF + " + " + ".join(KINDS) and not found.problems
    assert set(found.dtypes) == {*KINDS, "fp32"}
    assert found.parameters == sum(tensor.numel() for tensor in values.values())
    assert found.bytes == sum(row["bytes"] for row in found.dtypes.values()) < found.parameters * 2
    assert found.model == inspect_file(source.with_name("wan.safetensors")).model is not None
    readers = "ComfyUI's own loaders read no GGUF; Load Diffusion Model (Halfsafe) and ComfyUI-GGUF do."
    assert readers in found.in_comfyui
    json.dumps(vars(found))


@pytest.mark.parametrize("storage", ["as_file", "bf16", "fp16", "fp32"])
def test_conversion_to_16_or_32_bit_has_the_librarys_values(source, values, tmp_path, storage):
    summary, checkpoint = convert(source, tmp_path / "out.safetensors", storage)
    packed = {name for name, tensor in values.items() if tensor.dim() == 2 and "modulation" not in name and tensor.shape[1] % 256 == 0}
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(storage, torch.bfloat16)
    assert packed and checkpoint.weights.keys() == values.keys()
    for name in packed:
        assert torch.equal(checkpoint.weights[name].data, values[name].to(dtype)), name
    assert summary.source_bytes == open_checkpoint(source).data_bytes
    assert any(f"in Q4_K were unpacked to {'bf16' if storage == 'as_file' else storage}" in note for note in summary.notes)


@pytest.mark.parametrize(("storage", "bound"), [("int8", 0.012), ("fp8_e4m3fn", 0.03)])
def test_conversion_to_8_bit_quantizes_the_librarys_values_anew(source, values, tmp_path, storage, bound):
    summary, checkpoint = convert(source, tmp_path / "out.safetensors", storage)
    quantized = [weight for weight in checkpoint.weights.values() if weight.storage == storage]
    assert len(quantized) >= 10
    for weight in quantized:
        assert 0 < relative_error(values[weight.name], weight.dequantize(torch.float32)) < bound
    assert any("in Q4_K were quantized anew to" in note and "added" in note for note in summary.notes)
    assert inspect_file(tmp_path / "out.safetensors").card["weights"][storage] == len(quantized)


def test_the_converted_file_is_detected_as_the_same_model(source, tmp_path):
    convert(source, tmp_path / "out.safetensors", "int8", rules_from())
    assert inspect_file(tmp_path / "out.safetensors").model == inspect_file(source).model


def test_progress_of_a_conversion_ends_at_the_bytes_of_the_source(source, tmp_path):
    done = []
    convert(source, tmp_path / "out.safetensors", "bf16", progress=done.append)
    assert sum(done) == open_checkpoint(source).data_bytes and min(done) >= 0


def test_a_conversion_holds_one_weight_at_a_time(tmp_path, monkeypatch):
    released = []
    source = tmp_path / "in.gguf"
    blocks = {f"{name}.weight": ("Q8_0", gguf_files.blocks("Q8_0", (8, 64))) for name in "abc"}
    gguf_files.write(source, blocks)
    file = type(open_checkpoint(source))
    monkeypatch.setattr(file, "release", lambda self, name: released.append(name))
    convert(source, tmp_path / "out.safetensors", "bf16")
    assert released == [*blocks, *blocks]  # planned, then written


def test_scan_finds_nothing_in_a_sound_file(source):
    scan = scan_file(source)
    assert not scan.problems and scan.tensors == len(open_checkpoint(source))


@pytest.mark.parametrize(("kind", "number", "found"), [("Q8_0", np.nan, "nan"), ("Q6_K", np.inf, "inf"), ("Q4_K", -np.inf, "inf")])
def test_scan_counts_what_is_not_finite_and_loading_it_is_refused(tmp_path, kind, number, found):
    data = gguf_files.blocks(kind, (4, 512))
    at, block = gguf_files.halves_of(kind)[0], {"Q8_0": 34, "Q6_K": 210, "Q4_K": 144}[kind]
    data.reshape(-1, block)[3, at : at + 2] = np.array([number], np.float16).view(np.uint8)
    path = gguf_files.write(tmp_path / "in.gguf", {"a.weight": (kind, data), "b.weight": (kind, gguf_files.blocks(kind, (4, 512)))})
    problems = scan_file(path).problems
    assert {problem.tensor for problem in problems} == {"a.weight"} and found in {problem.kind for problem in problems}
    for storage in ("as_file", "int8", "fp8_e4m3fn"):
        with pytest.raises(NonFiniteWeight, match=r"in\.gguf: tensor 'a\.weight'"):
            convert(path, tmp_path / "out.safetensors", storage)
    assert not (tmp_path / "out.safetensors").exists()


def test_values_past_fp16_are_found_and_kept_in_bf16(tmp_path):
    data = gguf_files.blocks("Q4_0", (8, 64), std=60000.0)
    path = gguf_files.write(tmp_path / "in.gguf", {"a.weight": ("Q4_0", data)})
    assert [problem.kind for problem in scan_file(path).problems] == ["fp16_range"]
    summary, checkpoint = convert(path, tmp_path / "out.safetensors", "fp16")
    assert checkpoint.weights["a.weight"].storage == "bf16" and any("exceed fp16" in note for note in summary.notes)


@pytest.mark.parametrize("profile", ["sm_75", "sm_86", "sm_120", "cpu"])
def test_plan_decides_as_for_the_file_in_16_bit_and_says_what_a_layer_is_in(source, profile):
    device = detect(profile=profile)
    report, of_bf16 = plan_file(source, device), plan_file(source.with_name("wan.safetensors"), device)
    packed = {layer.name: layer for layer in report.layers if "in the file" in layer.reason}
    assert {layer.reason.split(";")[0] for layer in packed.values()} == {f"{kind} in the file" for kind in KINDS}
    of_bf16_layers = {layer.name: (layer.storage, layer.mode) for layer in of_bf16.layers if layer.name in packed}
    assert {name: (layer.storage, layer.mode) for name, layer in packed.items()} == of_bf16_layers
    assert report.model.weight_bytes == of_bf16.model.weight_bytes
    assert "GGUF + Q8_0" in report.decisions["file"]


def test_plan_takes_8_bit_where_16_bit_does_not_fit(source):
    report = plan_file(source, detect(profile="sm_86"), device_memory=1_000_000)
    assert {layer.storage for layer in report.layers} & {"int8", "fp8_e4m3fn"}


@pytest.mark.parametrize("command", [inspect_file, scan_file, lambda path: plan_file(path, detect(profile="cpu"))])
def test_every_command_refuses_a_text_encoder(tmp_path, command):
    path = gguf_files.write(tmp_path / "in.gguf", {"token_embd.weight": ("F32", np.ones((2, 2), np.float32))}, arch="t5encoder")
    with pytest.raises(CheckpointError, match="text encoder"):
        command(path)


@pytest.mark.parametrize("target", ["read", "inspect", "scan", "convert", "plan"])
def test_files_damaged_at_random_are_read_right_or_refused(tmp_path, target):
    tensors = {f"blocks.{number}.ffn.0.weight": (kind, gguf_files.blocks(kind, (16, 256))) for number, kind in enumerate(KINDS)}
    whole = gguf_files.write(tmp_path / "whole.gguf", tensors | {"a.bias": ("F32", np.ones(8, np.float32)), "b.weight": ("BF16", np.ones((4, 16), np.uint8))})
    content, path = whole.read_bytes(), tmp_path / "in.gguf"
    header = min(entry.start for entry in open_checkpoint(whole).entries.values())
    outcomes = set()
    for case in range(120):
        random, damaged = Random(case), bytearray(content)
        end = random.choice((header, len(content)))
        for _ in range(random.choice((1, 2, 8))):
            at = random.randrange(end)
            damaged[at] = random.choice((0, 1, 0x7C, 0x7E, 0x80, 0xFF, damaged[at] ^ 1 << random.randrange(8)))
        path.write_bytes(damaged)
        outcomes.add(fuzz_targets.judge(target, path, random))
    assert "ok" in outcomes and len(outcomes) > 1


def test_a_weight_without_values_stays_one(tmp_path):
    path = gguf_files.write(tmp_path / "in.gguf", {"a.weight": ("Q8_0", np.zeros((0, 34), np.uint8)), "b.weight": ("F32", np.ones(2, np.float32))})
    assert convert(path, tmp_path / "out.safetensors", "as_file")[1].weights["a.weight"].shape == (0, 32)


@pytest.mark.parametrize("name", ["wan.gguf", "wan.safetensors"])
def test_the_fingerprint_is_of_the_whole_header_and_the_beginning_of_each_tensor(folder, name):
    content, file = (folder / name).read_bytes(), open_checkpoint(folder / name)
    entries = list(file.entries.values())
    parts = [content[: min(entry.start for entry in entries)], *(content[entry.start : min(entry.end, entry.start + 4096)] for entry in entries)]
    assert fingerprint(file) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_source_that_is_the_target_is_refused(tmp_path):
    path = gguf_files.write(tmp_path / "in.gguf", {"a.weight": ("F32", np.ones((2, 2), np.float32))})
    with pytest.raises(CheckpointError, match="same file"):
        convert_file(path, path, "bf16", NO_RULES)
