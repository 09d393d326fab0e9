"""Damaged files: right or refused. `scripts/fuzz.py` runs the same in bulk; here what it once found."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import fuzz
import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError, NonFiniteWeight
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.format import comfy_quant_tensor
from halfsafe.precision.formats.plain import ONE_SCALE, scaled_format
from halfsafe.precision.plan.facts import layer_specs
from halfsafe.precision.plan.layers import plan_file
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.report.schema import LayerReport, Report
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import fuzz_targets, mutations
from support.dialects import E4M3
from support.storing import in_storages

NO_RULES = rules_from("", "none")
LAYER = "blocks.0.ffn.0"
bounded = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("target", fuzz_targets.TARGETS)
def test_mutated_files_are_read_right_or_refused(folder, target):
    path = folder / "in.safetensors"
    for case in range(150):
        path.write_bytes(mutations.mutated(Random(f"test:{case}")))
        fuzz_targets.judge(target, path, Random(case))
        assert {file.name for file in folder.iterdir()} <= {"in.safetensors", "out.safetensors"}


def test_genuine_files_convert_to_every_storage(folder):
    for name, content in mutations.genuine().items():
        path = folder / "in.safetensors"
        path.write_bytes(content)
        outcomes = {fuzz_targets.judge("convert", path, Random(seed)) for seed in range(12)}
        assert outcomes == {"ok"}, name


@bounded
@given(
    weight=st.sampled_from([(32, 48), (16, 16), (1, 8), (8, 1), (4, 4, 3, 3), (7,), (0, 4)]),
    scale=st.lists(st.integers(0, 48), max_size=4),
    values=st.sampled_from([0.5, 2.0**-20, 3e38, 0.0, -1.0, float("nan"), float("inf")]),
    leaf=st.sampled_from(["weight_scale", "weight_scale_inv", "scale_weight", "scale"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_scale_of_any_shape_is_applied_exactly_or_refused(weight, scale, values, leaf, dtype):
    data = torch.arange(torch.Size(weight).numel()).remainder(7).float().view(weight).to(E4M3)
    tensor = torch.full(scale, values).to(dtype)
    try:
        found = read_checkpoint({"a.weight": data, f"a.{leaf}": tensor}, {}, "m.safetensors").weights["a.weight"]
    except CheckpointError as error:
        assert f"a.{leaf}" in str(error)
        usable = tensor.numel() and 0 < tensor.float().max() < float("inf") and scaled_format(tensor, weight)
        assert not usable
    else:
        assert torch.equal(found.dequantize(torch.float32), data.float() * tensor.float().flatten()[0])


# what was found, one test each


def file_of(folder: Path, tensors: dict, metadata: dict | None = None) -> Path:
    save_file(tensors, folder / "in.safetensors", metadata)
    return folder / "in.safetensors"


@pytest.mark.parametrize("shape", [(-1, 1), (1, -1)])
def test_settings_in_two_dimensions_are_read_as_comfyui_reads_them(shape):
    marker = comfy_quant_tensor({"format": "float8_e4m3fn"}).reshape(shape)
    tensors = {"a.weight": torch.ones(4, 4).to(E4M3), "a.weight_scale": torch.tensor(0.5), "a.comfy_quant": marker}
    assert read_checkpoint(tensors, {}, "m").weights["a.weight"].format is ONE_SCALE


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(tmp_path):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for header in ({"__metadata__": {"author": "\ud800"}, "a": entry}, {"__metadata__": {"\ud800": "x"}, "a": entry}):
        path = tmp_path / "in.safetensors"
        path.write_bytes(mutations.with_length(json.dumps(header).encode()) + bytes(4))
        with pytest.raises(CheckpointError, match="hex escape"):
            open_checkpoint(path)
    tensors = {"a.weight": torch.ones(4, 4).to(E4M3), "a.comfy_quant": comfy_quant_tensor({"format": "\ud800"})}
    with pytest.raises(CheckpointError, match=r"a\.comfy_quant.*surrogates"):
        read_checkpoint(tensors, {}, "m")


@pytest.mark.parametrize("shard", ["\ud800", "x" * 5000])
def test_an_index_that_names_an_impossible_file_is_refused(tmp_path, shard):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(index)
    assert len(str(error.value).encode()) < 1000


@pytest.mark.parametrize("storage", ["as_file", "fp8_e5m2"])
@pytest.mark.parametrize(
    "tensors",
    [
        {"a.weight": torch.full((4, 4), 448.0).to(E4M3), "a.weight_scale": torch.tensor(1e37)},
        {"a.weight": torch.full((4, 4), 1e300, dtype=torch.float64)},
    ],
    ids=["scale", "fp64"],
)
def test_a_weight_that_would_be_infinite_in_fp32_is_refused(tmp_path, tensors, storage):
    with pytest.raises(NonFiniteWeight, match=r"a\.weight.*exceeds the range of fp32"):
        convert_file(file_of(tmp_path, tensors), tmp_path / "out.safetensors", storage, NO_RULES)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("dtype", "storage"), [(torch.bfloat16, "fp8_e5m2"), (torch.float32, "bf16"), (torch.float32, "fp8_e4m3fn")]
)
def test_values_that_rounding_would_make_infinite_are_kept_or_refused(tmp_path, dtype, storage):
    path = file_of(tmp_path, {"a.weight": torch.full((4, 4), torch.finfo(dtype).max, dtype=dtype)})
    convert_file(path, tmp_path / "out.safetensors", "as_file", NO_RULES)
    with pytest.raises(NonFiniteWeight, match=r"a\.weight.*round to infinity"):
        convert_file(path, tmp_path / "out.safetensors", storage, NO_RULES)


@pytest.mark.parametrize(
    ("dtype", "others"),
    [(torch.bool, ()), (torch.int64, ()), (torch.uint8, ()), (torch.complex64, ()), (torch.float16, ("weight_scale",))],
)
def test_a_scale_that_a_weight_cannot_have_is_refused(dtype, others):
    """A weight that is no number, or that has another scale."""
    scales = {f"a.{leaf}": torch.tensor(0.5) for leaf in (*others, "scale_weight")}
    with pytest.raises(CheckpointError, match=r"a\.scale_weight"):
        read_checkpoint({"a.weight": torch.ones(4, 4).to(dtype), **scales}, {}, "m")


@pytest.mark.parametrize("leaf", ["weight_scale_2", "layer_scale"])
def test_a_weight_beside_a_tensor_named_like_a_scale_stays_in_16_bit(tmp_path, leaf):
    path = file_of(
        tmp_path, {"a.weight": torch.randn(16, 16).half(), f"a.{leaf}": torch.rand(3), "b.weight": torch.randn(16, 16)}
    )
    summary = convert_file(path, tmp_path / "out.safetensors", "fp8_e4m3fn", NO_RULES)
    out = open_checkpoint(tmp_path / "out.safetensors")
    assert (out["a.weight"].dtype, out["b.weight"].dtype) == (torch.float16, E4M3)
    assert torch.equal(out[f"a.{leaf}"], open_checkpoint(path)[f"a.{leaf}"]) and any(
        "a.weight" in note for note in summary.notes
    )
    assert inspect_file(out.path).problems == []
    checkpoint = read_checkpoint(open_checkpoint(path), {}, path)
    wanted = {
        name.removesuffix(".weight"): plan.storage
        for name, plan in plan_file(checkpoint, checkpoint.prefix, "fp8_e4m3fn", NO_RULES).items()
    }
    assert set(in_storages(checkpoint, wanted)[0]) == set(out)


def test_bare_exponents_are_no_weight(tmp_path):
    if not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("this torch has no e8m0")
    exponents = torch.arange(1, 255, dtype=torch.uint8).view(127, 2)
    path = file_of(tmp_path, {"a.weight": exponents.view(torch.float8_e8m0fnu)})
    with pytest.raises(CheckpointError, match="'a.weight': in float8_e8m0fnu, and nothing in the file says"):
        convert_file(path, tmp_path / "out.safetensors", "fp8_e4m3fn", NO_RULES)


def test_a_tensor_named_as_its_own_prefix_has_a_plan(tmp_path):
    path = file_of(tmp_path, {"net.weight": torch.ones(4, 4), "net.a.weight": torch.ones(4, 4)})
    checkpoint = read_checkpoint(open_checkpoint(path), {}, path)
    assert [layer.name for layer in layer_specs(checkpoint, checkpoint.prefix)] == ["a"]


@pytest.mark.parametrize("number", ["²", "٣", "9" * 900, "9" * 5000])
def test_numbers_that_are_no_block_numbers_are_told_in_a_report(number):
    names = [f"blocks.{number}.a", "blocks.1.a", "blocks.1.b", "blocks.2.b", f"blocks.{number}.b"]
    report = Report(
        layers=[LayerReport(name, "Linear", "fp16", name, "fp32", "same") for name in names[:2] * 2 + names[2:]]
    )
    assert number in report.to_text()


def test_blocks_of_empty_weights_are_converted(tmp_path):
    path = tmp_path / "empty.safetensors"
    save_file(
        {f"blocks.{block}.{layer}.weight": torch.zeros(0, 0) for block in range(4) for layer in ("a", "b")}
        | {"x.weight": torch.ones(16, 16)},
        path,
    )
    fuzz_targets.judge("convert", path, Random(0))


# the fuzzer itself


def test_the_same_case_is_the_same_file():
    first, again, other = (mutations.mutated(Random(seed)) for seed in ("7:1", "7:1", "7:2"))
    assert first == again != other


def test_wrong_answers_and_unknown_errors_are_failures(tmp_path, monkeypatch):
    def wrong(path, random):
        raise KeyError("untyped")

    def leaves_a_file(path, random):
        (path.parent / "left").touch()

    monkeypatch.setattr(
        fuzz_targets, "TARGETS", {"wrong": wrong, "leaves": leaves_a_file, "read": fuzz_targets.check_read}
    )
    failures = fuzz.run_case(0, 0, tmp_path, Counter())
    assert {key.split(":")[0] for key in failures} == {"wrong", "leaves"}
    assert list(tmp_path.iterdir()) == []
