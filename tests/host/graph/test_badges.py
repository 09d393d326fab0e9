"""What nodes send to the page beside their outputs: the dtypes in use, and the report."""

import json
from types import SimpleNamespace

import pytest
import torch
from halfsafe.precision.base.dtypes import name_of
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.plan import rules as plan_rules
from server import PromptServer
from support import model_files, tiny_models

SUMS = {"reduced_precision_reduction": "unchanged", "fp8_fast_accumulation": "unchanged", "attention": "unchanged"}


@pytest.fixture(scope="module")
def files(models_dir):
    tiny_models.wan(models_dir / "diffusion_models" / "badge_wan.safetensors")
    tiny_models.narrow_clip_l(models_dir / "text_encoders" / "badge_clip.safetensors")
    tiny_models.wan_vae(models_dir / "vae" / "badge_vae.safetensors")
    return models_dir


def run(comfy, node_id, **inputs):
    """The node's outputs and the words on its badge."""
    output = comfy.nodes[node_id].execute(**inputs)
    return output.args, " \u00b7 ".join((output.ui or {}).get("halfsafe_badge", [[]])[0])


def load(comfy, storage, compute):
    return run(
        comfy, "HalfsafeLoadDiffusionModel", model_name="badge_wan.safetensors", storage=storage, compute=compute
    )


@pytest.mark.parametrize(
    "storage, compute, held",
    [("bf16", "fp32", "bf16"), ("fp16", "fp16", "fp16"), ("fp16", "fp16_safe", "fp16"), ("as_file", "fp32", "bf16")],
)
def test_a_loaded_models_badge_says_what_is_held_and_used(comfy, files, storage, compute, held):
    assert load(comfy, storage, compute)[1] == f"{held} \u00b7 {compute}"


def test_a_text_encoder_says_its_storages_and_a_vae_one_dtype(comfy, files):
    _, clip = run(
        comfy, "HalfsafeLoadCLIP", clip_name1="badge_clip.safetensors", type="sd3", storage="fp8_e4m3fn", compute="auto"
    )
    _, vae = run(comfy, "HalfsafeLoadVAE", vae_name="badge_vae.safetensors", dtype="fp32")
    assert (clip, vae) == ("fp8_e4m3fn + fp16", "fp32")


AS_FILE = {"storage": "as_file", "compute": "auto"}
OF_FP8 = [
    ("HalfsafeLoadDiffusionModel", "diffusion_models", "badge_wan", {"model_name": None, **AS_FILE}),
    ("HalfsafeLoadCLIP", "text_encoders", "badge_clip", {"clip_name1": None, "type": "sd3", **AS_FILE}),
    ("HalfsafeLoadVAE", "vae", "badge_vae", {"vae_name": None, "dtype": "fp32"}),
]


@pytest.mark.parametrize(("node", "folder", "file", "inputs"), OF_FP8, ids=["model", "text encoder", "VAE"])
def test_a_loader_says_that_the_file_lacks_the_scales_of_its_fp8(comfy, files, node, folder, file, inputs):
    def scaled(tensors):
        for name, tensor in tensors.items():
            if tensor.dim() > 1 and name.endswith("weight"):
                tensors[name] = torch.randn(tensor.shape).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)

    source = files / folder / f"{file}.safetensors"
    path = model_files.changed(source, source.with_stem("badge_fp8"), scaled)
    named = {key: path.name if value is None else value for key, value in inputs.items()}
    assert run(comfy, node, **named)[1].endswith(" \u00b7 fp8 without its scales")


def test_compute_nodes_say_what_they_chose_on_any_model(comfy, files):
    model = comfy.core["UNETLoader"]().load_unet("badge_wan.safetensors", "default")[0]
    held = name_of(model.model.diffusion_model.head.head.weight.dtype)
    assert run(comfy, "HalfsafeComputeDtype", model=model, compute="fp16_safe")[1] == f"{held} \u00b7 fp16_safe"
    (chosen, *_), words = run(comfy, "HalfsafeAutoPrecision", model=model, goal="quality")
    assert words.startswith(f"{held} \u00b7 ") and chosen is not model


def test_a_node_that_leaves_the_fp16_of_a_model_unasked_says_so(comfy, files, monkeypatch):
    """Whoever chose the fp16: its file, or ComfyUI's own ModelComputeDtype."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "cpu")
    (of_file,), _ = load(comfy, "fp16", "fp16")
    of_node = comfy.core["UNETLoader"]().load_unet("badge_wan.safetensors", "default")[0].clone()
    of_node.set_model_compute_dtype(torch.float16)
    for model in (of_file, of_node):
        told = [
            comfy.nodes[name].execute(model=model, **inputs).ui.get("halfsafe_instead")
            for name, inputs in (
                ("HalfsafeAutoPrecision", {"goal": "balanced"}),
                ("HalfsafeComputeDtype", {"compute": "auto"}),
                ("HalfsafeComputeDtype", {"compute": "fp32"}),
            )
        ]
        assert (
            told[0] == told[1]
            and told[0][0].startswith("Computed in fp32, not in the fp16 that the model was set to. ")
            and told[2] is None
        )
    (plain,), _ = load(comfy, "as_file", "fp32")
    assert "halfsafe_instead" not in comfy.nodes["HalfsafeAutoPrecision"].execute(model=plain, goal="balanced").ui


def test_badge_and_head_say_what_rules_run_and_which_match_nothing(comfy, files, monkeypatch):
    monkeypatch.setattr(plan_rules, "NO_LAYER", "the reason may be worded otherwise")
    rules, _ = comfy.run("HalfsafeLayerRules", rules="* compute=fp16\nblocks.77.* compute=fp32", preset="none")
    inputs = {"model_name": "badge_wan.safetensors", "storage": "as_file", "compute": "bf16", "rules": rules}
    output = comfy.nodes["HalfsafeLoadDiffusionModel"].execute(**inputs)
    assert (output.ui["halfsafe_badge"], output.ui["halfsafe_unmatched"]) == (
        [["bf16", "fp16"]],
        ["blocks.77.* compute=fp32"],
    )
    report = json.loads(comfy.run("HalfsafeReport", model=output.args[0])[1])
    count, total = (
        report["decisions"]["compute"]
        .removeprefix("fp16 in ")
        .partition(" layers by rules; all other layers: bf16")[0]
        .split(" of ")
    )
    assert count == total == str(sum(layer["mode"] == "fp16" for layer in report["layers"]))


def test_sums_that_cannot_act_here_are_not_on_the_badge(comfy, files):
    (model,), _ = load(comfy, "fp16", "fp16")
    assert run(comfy, "HalfsafeAccumulation", model=model, fp16_accumulation="on", tf32="on", **SUMS)[1] == "fp32 sums"
    assert (
        run(comfy, "HalfsafeAccumulation", model=model, fp16_accumulation="unchanged", tf32="unchanged", **SUMS)[1]
        == ""
    )


def test_a_cached_node_sends_its_badge_or_result_again(comfy):
    ids = [node_id for node_id, node in comfy.nodes.items() if node_id.startswith("HalfsafeLoad")]
    assert len(ids) == 5
    ids += ["HalfsafeAnalyzeLayers", "HalfsafeCalibrate", "HalfsafeMeasurePrecisions", "HalfsafeCheckFinite"]
    assert all(comfy.nodes[node_id].GET_SCHEMA().has_intermediate_output for node_id in ids)


def test_the_report_is_sent_as_text_so_that_it_counts_as_no_file(comfy, files):
    (model,), _ = load(comfy, "fp8_e4m3fn", "auto")
    output = comfy.nodes["HalfsafeReport"].execute(model=model)
    assert output.ui["text"] == (output.args[0],)
    (data,) = output.ui["halfsafe_report"]
    assert data == output.args[1] and json.loads(data)["version"] == 1


def test_an_error_of_a_node_is_preceded_by_its_messages(comfy, monkeypatch):
    """ComfyUI sends the text of an error alone, which a page in another language words by its templates."""
    sent = []
    server = SimpleNamespace(send_sync=lambda event, data, page: sent.append((event, data)), client_id="page")
    monkeypatch.setattr(PromptServer, "instance", server, raising=False)
    with pytest.raises(HalfsafeError) as caught:
        comfy.nodes["HalfsafeCheckFinite"].execute(value=3, on_nan="stop")
    ((event, data),) = sent
    assert event == "halfsafe.messages" and data["messages"]["Check Finite cannot check a int."] == {
        "template": "Check Finite cannot check a {0}.",
        "values": {"0": "int"},
    }
    assert data["messages"][str(caught.value)]["template"] == "{problem} {advice}" and data["text"] == str(caught.value)
