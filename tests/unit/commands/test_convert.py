"""Converting files: right, in constant memory, whole or not at all; and what inspect and scan say of them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError, NonFiniteWeight
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import CARD_KEY
from halfsafe.precision.plan import layers as plan_of_layers
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import dialects
from support.dialects import E4M3, E5M2
from support.measures import relative_error

ROOT = Path(__file__).resolve().parents[3]
LAYER = "blocks.0.ffn.0"
NO_RULES = rules_from("", "none")


def model(folder, name="in.safetensors", prefix="", **extra):
    """A small bf16 model: two Linear layers, a norm, an embedder that the default preset keeps, a convolution."""
    weights, _ = dialects.reference()
    tensors = {f"{layer}.weight": weight for layer, weight in weights.items()}
    tensors |= {"blocks.0.norm.weight": torch.ones(64), "blocks.0.ffn.0.bias": torch.randn(256).bfloat16()}
    tensors |= {
        "time_embedding.0.weight": torch.randn(64, 64).bfloat16(),
        "conv.weight": torch.randn(4, 4, 3, 3).half(),
    }
    named = {prefix + key: value for key, value in tensors.items()} | extra
    save_file(named, folder / name, {"format": "pt", "author": "me"})
    return folder / name, named


def test_converts_linear_layers_and_keeps_the_rest_as_it_was(tmp_path):
    source, tensors = model(tmp_path)
    seen = []
    summary = convert_file(source, tmp_path / "out.safetensors", "fp8_e4m3fn", rules_from(""), seen.append)
    out = open_checkpoint(tmp_path / "out.safetensors")
    assert {**out.metadata, CARD_KEY: ""} == {"format": "pt", "author": "me", CARD_KEY: ""}
    quantized = {name.removesuffix(".comfy_quant") for name in out if name.endswith(".comfy_quant")}
    assert quantized == {"blocks.0.ffn.0", "blocks.0.ffn.2"}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if layer in quantized:
            assert relative_error(tensor, out[name].float() * out[f"{layer}.weight_scale"]) < 0.028
            assert json.loads(bytes(out[f"{layer}.comfy_quant"].tolist())) == {"format": "float8_e4m3fn"}
        else:
            assert torch.equal(out[name], tensor) and out[name].dtype == tensor.dtype
    assert sum(seen) == open_checkpoint(source).data_bytes == summary.source_bytes
    assert summary.target_bytes == os.path.getsize(summary.target)
    assert summary.weights == {"fp8_e4m3fn": 2, "fp32": 1, "bf16": 2, "fp16": 1}
    assert ("time_embedding.0", "timestep, guidance and pooled embedding") in summary.kept


def test_only_the_diffusion_model_of_a_full_checkpoint_is_converted(tmp_path):
    vae = {"first_stage_model.decoder.proj.weight": torch.randn(64, 64).half()}
    source, tensors = model(tmp_path, prefix="model.diffusion_model.", **vae)
    convert_file(source, tmp_path / "out.safetensors", "fp8_e4m3fn", rules_from(""))
    out = open_checkpoint(tmp_path / "out.safetensors")
    assert out[f"model.diffusion_model.{LAYER}.weight"].dtype == E4M3
    assert out["model.diffusion_model.time_embedding.0.weight"].dtype == torch.bfloat16
    assert torch.equal(out["first_stage_model.decoder.proj.weight"], tensors["first_stage_model.decoder.proj.weight"])


def test_a_sharded_set_becomes_one_file(tmp_path):
    weights, _ = dialects.reference(("a", "b", "c"))
    for number, (layer, weight) in enumerate(weights.items(), 1):
        save_file({f"{layer}.weight": weight}, tmp_path / f"m-{number:05d}-of-00003.safetensors")
    convert_file(tmp_path / "m-00002-of-00003.safetensors", tmp_path / "out.safetensors", "fp8_e4m3fn", NO_RULES)
    out = open_checkpoint(tmp_path / "out.safetensors")
    assert [name for name in out if name.endswith(".weight")] == ["a.weight", "b.weight", "c.weight"]
    for number in (1, 2, 3):
        with pytest.raises(CheckpointError, match="same file"):
            source = tmp_path / "m-00001-of-00003.safetensors"
            convert_file(source, tmp_path / f"m-{number:05d}-of-00003.safetensors", "bf16", NO_RULES)


@pytest.mark.parametrize("writer", [dialects.scaled_fp8, dialects.block_wise, dialects.quantization_metadata])
def test_a_converted_file_is_comfyuis_own_format_and_converts_to_itself(tmp_path, writer):
    weights, biases = dialects.reference()
    source = writer(tmp_path / "in.safetensors", weights, biases)
    convert_file(source, tmp_path / "one.safetensors", "as_file", NO_RULES)
    assert inspect_file(tmp_path / "one.safetensors").dialect == "comfy_quant"
    convert_file(tmp_path / "one.safetensors", tmp_path / "two.safetensors", "fp8_e4m3fn", NO_RULES)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("storage", "name"), [("fp8_e4m3fn", f"{LAYER}.weight"), ("as_file", f"{LAYER}.bias"), ("bf16", f"{LAYER}.weight")]
)
def test_nan_is_an_error_wherever_it_is_and_leaves_no_file(tmp_path, storage, name):
    weights, biases = dialects.reference()
    (weights if name.endswith("weight") else biases)[LAYER].view(-1)[5] = float("nan")
    source = dialects.plain(tmp_path / "in.safetensors", weights, biases)
    with pytest.raises(NonFiniteWeight, match=rf"in\.safetensors.*{name}"):
        convert_file(source, tmp_path / "out.safetensors", storage, NO_RULES)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("fault", ["value", "scale"])
def test_of_a_model_in_parts_the_damaged_one_is_named(tmp_path, fault):
    first, second = (tmp_path / f"m-0000{number}-of-00002.safetensors" for number in (1, 2))
    save_file({"blocks.0.norm.weight": torch.ones(64)}, first)
    bad = {f"{LAYER}.weight": torch.full((64, 64), torch.nan)}
    if fault == "scale":
        bad = {f"{LAYER}.weight": torch.ones(64, 64).to(E4M3), f"{LAYER}.weight_scale": torch.tensor(torch.nan)}
    save_file(bad, second)
    with pytest.raises(NonFiniteWeight, match=f"{second.name}: tensor '{LAYER}"):
        convert_file(first, tmp_path / "out.safetensors", "fp8_e4m3fn", NO_RULES)
    assert second.name in inspect_file(first, values=True).problems[0]["text"]
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_loras_and_the_source_itself_are_refused(tmp_path):
    save_file({"a.lora_down.weight": torch.ones(4, 4)}, tmp_path / "lora.safetensors")
    with pytest.raises(CheckpointError, match="LoRA"):
        convert_file(tmp_path / "lora.safetensors", tmp_path / "out.safetensors", "fp8_e4m3fn", NO_RULES)
    source, _ = model(tmp_path)
    (tmp_path / "link.safetensors").symlink_to(source)
    with pytest.raises(CheckpointError, match="same file"):
        convert_file(source, tmp_path / "link.safetensors", "fp8_e4m3fn", NO_RULES)


def test_a_source_that_is_cut_while_it_is_planned_is_an_error(tmp_path, monkeypatch):
    """A read past the new end would end the process."""
    source, _ = model(tmp_path)
    size = source.stat().st_size

    def sampled(*_):
        assert source.stat().st_size == size, "a weight is read of a file that was cut"
        os.truncate(source, 4096)
        return False

    monkeypatch.setattr(plan_of_layers, "exceeds_fp16", sampled)
    with pytest.raises(CheckpointError, match=r"in\.safetensors.*truncated to 4096 bytes"):
        convert_file(source, tmp_path / "out.safetensors", "fp16", NO_RULES)
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors"]


# memory and interruption, in a process of its own

SCRIPT = """
    import os, signal, sys, threading
    sys.path.insert(0, {tests!r})
    import conftest, torch
    from halfsafe.precision.base.amax import amax_value
    from halfsafe.precision.commands.convert import convert_file
    from halfsafe.precision.formats.fp8 import quantize
    from halfsafe.precision.plan.rules import rules_from
    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
    quantize(torch.ones(1 << 22).bfloat16(), torch.float8_e4m3fn, amax_value(torch.ones(1 << 22)))
    done, peak, start = threading.Event(), [0], anonymous()
    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    threading.Thread(target=watch, daemon=True).start()
    seen = [0]
    def progress(count):
        seen[0] += count
        {progress}
    convert_file({source!r}, {target!r}, "fp8_e4m3fn", rules_from("", "none"), progress)
    done.set()
    print(peak[0] - start)
"""


def in_a_process(source, target, progress="pass"):
    values = {"tests": str(ROOT / "tests"), "source": str(source), "target": str(target)}
    script = textwrap.dedent(SCRIPT).format(**values, progress=progress)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_below_three_times_the_largest_tensor(tmp_path):
    """The largest takes 64 MiB: beside 32, the 20 MB of freed blocks that glibc keeps in some runs are most of the room."""
    weights = {f"blocks.{number}": torch.full((4096, 8192), 0.01 * number + 1).bfloat16() for number in range(4)}
    source = dialects.plain(tmp_path / "in.safetensors", weights, {})
    del weights
    assert open_checkpoint(source).data_bytes > 200_000_000
    done = in_a_process(source, tmp_path / "out.safetensors")
    assert done.returncode == 0, done.stderr
    files = (open_checkpoint(source), open_checkpoint(tmp_path / "out.safetensors"))
    largest = max(tensor.nbytes for file in files for tensor in file.values())
    assert 1 << 20 < int(done.stdout) <= 3 * largest


@pytest.mark.skipif(sys.platform != "linux", reason="kills as Linux does")
def test_a_conversion_killed_half_way_leaves_the_old_target(tmp_path):
    source, _ = model(tmp_path)
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"old")
    done = in_a_process(source, target, progress="seen[0] > 200000 and os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["in.safetensors", "out.safetensors"]
    assert len(list(tmp_path.glob("out.safetensors.*.part"))) == 1, "what is left is named as a part"


# inspect and scan


@pytest.mark.parametrize(
    "writer, dialect, scales, statement",
    [
        (dialects.plain, "plain", {}, None),
        (dialects.comfy_quant, "comfy_quant", {"tensor": 2}, "clipped at 448"),
        (lambda *a: dialects.scaled_fp8(*a, dtype=E5M2), "scaled_fp8", {"tensor": 2}, "NaN"),
        (dialects.modelopt, "weight_scale", {"tensor": 2, "input": 2}, "the scale is dropped"),
        (dialects.block_wise, "weight_scale_inv", {"block": 2}, "the scale is dropped"),
    ],
)
def test_inspect_tells_dialect_scales_and_what_comfyui_would_do(tmp_path, writer, dialect, scales, statement):
    weights, biases = dialects.reference()
    inspection = inspect_file(writer(tmp_path / "a.safetensors", weights, biases))
    assert (inspection.dialect, inspection.scales, inspection.layers) == (dialect, scales, 2)
    assert not inspection.values and inspection.problems == [] and inspection.parameters == 2 * 256 * 384 + 2 * 256
    assert sum(row["bytes"] for row in inspection.dtypes.values()) == inspection.bytes
    assert (statement is None and not inspection.in_comfyui) or any(statement in text for text in inspection.in_comfyui)


def test_inspect_reports_a_lost_scale_as_a_problem(tmp_path):
    save_file({"a.weight": torch.ones(4, 4).to(E4M3), "a.my_scale": torch.ones(1)}, tmp_path / "a.safetensors")
    inspection = inspect_file(tmp_path / "a.safetensors")
    assert inspection.dialect is None and "a.my_scale" in inspection.problems[0]["text"]


@pytest.mark.parametrize("writer", [dialects.plain, dialects.comfy_quant, dialects.modelopt, dialects.block_wise])
def test_scan_finds_nothing_in_sound_files(tmp_path, writer):
    path = writer(tmp_path / "a.safetensors", *dialects.reference())
    seen = []
    scan = inspect_file(path, values=True, progress=seen.append)
    assert scan.problems == [] and sum(seen) == open_checkpoint(path).data_bytes


NAN = float("nan")
FAULTS = {
    "nan": ({"a.weight": torch.tensor([[1.0, NAN, NAN]])}, "a.weight", "2 of 3 values are NaN"),
    "inf": ({"b.bias": torch.tensor([1.0, -float("inf")]).half()}, "b.bias", "1 of 2 values are infinite"),
    "fp8 nan": (
        {"a.weight": torch.full((2, 2), 0x7F, dtype=torch.uint8).view(E4M3)},
        "a.weight",
        "4 of 4 values are NaN",
    ),
    "fp16_range": ({"a.weight": torch.full((2, 2), 70000.0).bfloat16()}, "a.weight", "65504"),
    "row range": (
        {"a.weight": torch.full((2, 2), 448.0).to(E4M3), "a.weight_scale": torch.tensor([1.0, 200.0])},
        "a.weight",
        "65504",
    ),
    "zero scale": (
        {"a.weight": torch.ones(2, 2).to(E4M3), "a.weight_scale": torch.tensor(0.0)},
        "a.weight_scale",
        "scale of 0",
    ),
    "lost scale": ({"a.weight": torch.ones(2, 2).to(E4M3), "a.act_scale": torch.tensor(1.0)}, "a.act_scale", "scale"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_scan_names_tensor_and_fault(tmp_path, fault):
    tensors, name, text = FAULTS[fault]
    save_file(tensors, tmp_path / "a.safetensors")
    problems = inspect_file(tmp_path / "a.safetensors", values=True).problems
    assert [problem["tensor"] for problem in problems] == [name] and text in problems[0]["text"]


def test_scan_takes_zero_weights_and_rows_in_range(tmp_path):
    data = torch.tensor([[448.0], [1.0]]).to(E4M3)
    tensors = {
        "zero.weight": torch.zeros(4, 4),
        "none.weight": torch.zeros(0, 4),
        "a.weight": data,
        "a.weight_scale": torch.tensor([1.0, 200.0]),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    assert inspect_file(tmp_path / "a.safetensors", values=True).problems == []


def test_convert_keeps_the_attention_that_a_file_asks_for(tmp_path):
    config = {"attention": "comfy_kitchen_int8", "version": 1}
    asked = {f"blocks.{block}.attn.comfy_attention.config": dialects.comfy_quant_bytes(config) for block in range(2)}
    source, target = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    save_file({"blocks.0.ffn.0.weight": torch.randn(256, 256).half(), **asked}, source)
    convert_file(source, target, "fp8_e4m3fn", NO_RULES)
    assert all(torch.equal(load_file(target)[name], tensor) for name, tensor in asked.items())


FLUX_WIDTH = 32


def flux_with_diffusers_names(folder):
    """A double and a single block of Flux, by the names by which ComfyUI knows such a file."""
    draw = torch.Generator().manual_seed(7)

    def matrix(rows, columns=FLUX_WIDTH):
        return torch.randn(rows, columns, generator=draw).bfloat16()

    double = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
    tensors = {f"transformer_blocks.0.{layer}.weight": matrix(FLUX_WIDTH) for layer in double}
    tensors |= {f"single_transformer_blocks.0.attn.to_{leaf}.weight": matrix(FLUX_WIDTH) for leaf in "qkv"}
    tensors["single_transformer_blocks.0.proj_mlp.weight"] = matrix(4 * FLUX_WIDTH)
    tensors["norm_out.linear.weight"] = matrix(2 * FLUX_WIDTH)
    tensors["time_text_embed.text_embedder.linear_1.weight"] = matrix(FLUX_WIDTH)
    tensors["x_embedder.weight"] = matrix(FLUX_WIDTH)
    tensors["of_another_tool"] = torch.ones(3)
    save_file(tensors, folder / "flux.safetensors")
    return folder / "flux.safetensors", tensors


def test_diffusers_names_become_comfyui_s_and_every_value_is_written(tmp_path):
    source, tensors = flux_with_diffusers_names(tmp_path)
    seen = []
    summary = convert_file(source, tmp_path / "out.safetensors", "bf16", NO_RULES, seen.append)
    out = load_file(tmp_path / "out.safetensors")
    single = [
        f"single_transformer_blocks.0.{layer}.weight" for layer in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ]
    assert torch.equal(out["single_blocks.0.linear1.weight"], torch.cat([tensors[name] for name in single]))
    halves = tensors["norm_out.linear.weight"].chunk(2)
    assert torch.equal(out["final_layer.adaLN_modulation.1.weight"], torch.cat(halves[::-1]))
    assert torch.equal(out["of_another_tool"], tensors["of_another_tool"])
    assert sum(it.numel() for it in out.values()) == sum(it.numel() for it in tensors.values())
    assert sum(seen) == summary.source_bytes and any("diffusers" in note for note in summary.notes)


def test_nan_in_a_part_of_a_fused_tensor_is_told_by_its_own_name(tmp_path):
    source, tensors = flux_with_diffusers_names(tmp_path)
    tensors["transformer_blocks.0.attn.to_k.weight"][3, 5] = torch.nan
    save_file(tensors, source)
    with pytest.raises(NonFiniteWeight, match="tensor 'transformer_blocks.0.attn.to_k.weight'"):
        convert_file(source, tmp_path / "out.safetensors", "int8", NO_RULES)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_fused_tensor_without_one_of_its_parts_is_refused(tmp_path):
    source, tensors = flux_with_diffusers_names(tmp_path)
    del tensors["single_transformer_blocks.0.proj_mlp.weight"]
    save_file(tensors, source)
    with pytest.raises(CheckpointError, match="proj_mlp.weight': lacks a part of single_blocks.0.linear1.weight"):
        convert_file(source, tmp_path / "out.safetensors", "int8", NO_RULES)
