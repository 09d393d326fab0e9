"""What ComfyUI does here: five facts, each read from the ComfyUI that runs, with the switch that changes it."""

import json
from types import SimpleNamespace

import comfy.memory_management
import pytest
import torch
from comfy.model_management import load_models_gpu
from halfsafe.nodes.host.reporting import here
from support import families, tiny_models

SWITCHES = {"kernels", "compiler", "dynamic VRAM", "attention", "loaded"}


def fact(what: str) -> here.Fact:
    (found,) = (one for one in here.facts_here() if one.what == what)
    return found


def test_each_fact_has_a_switch_of_comfyui_on_a_gpu_and_none_elsewhere(comfy, monkeypatch):
    from comfy.cli_args import parser

    known = {option for action in parser._actions for option in action.option_strings}
    assert not any(one.switch for one in here.facts_here()), "nothing here would change anything"
    monkeypatch.setattr(here, "compute_device", lambda: torch.device("cuda"))
    facts = here.facts_here()
    assert {one.what for one in facts} == SWITCHES and len(facts) == 5
    for one in facts:
        named = {word.strip(",") for word in one.switch.split() if word.startswith("--")}
        assert one.here and one.switch and named <= known, one


def test_a_switch_shows_in_its_fact(pack, monkeypatch):
    assert fact("dynamic VRAM").here.startswith("off: ")
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    monkeypatch.setattr(here, "args", SimpleNamespace(vram_headroom=1.5, fast_disk=True, disable_comfy_compiler=False))
    assert (
        fact("dynamic VRAM").here == "on, 1.50 GiB of headroom; weights are read from a fast disk when used"
        and fact("compiler").here == "on"
    )
    here.args.disable_comfy_compiler = True
    assert fact("compiler").here == "off"


def test_what_is_loaded_is_told_with_its_size_and_what_its_file_asks_for(comfy, models_dir, monkeypatch):
    families.unload_models()
    assert fact("loaded").here == "nothing yet"
    model = families.load(
        comfy, tiny_models.wan(models_dir / "diffusion_models" / "here.safetensors"), "as_file", "auto"
    )
    load_models_gpu([model])
    assert fact("loaded").here.startswith("WAN21, all of ") and fact("loaded").here.endswith(" on the device")
    monkeypatch.setattr(
        here,
        "kernel_of_file",
        lambda module: ("kitchen int8", False) if module is model.model.diffusion_model else None,
    )
    assert fact("attention").here.endswith(
        "the file of WAN21 requests kitchen int8 in 1 attentions, which this device does not support"
    )
    families.unload_models()


def test_an_attention_that_a_node_chose_and_its_switch_are_told(comfy, models_dir, monkeypatch):
    """As ComfyUI 0.33 has it: comfy-kitchen's attention for all models, or by ModelAttentionBackend for one."""
    model = families.load(
        comfy, tiny_models.wan(models_dir / "diffusion_models" / "chosen.safetensors"), "as_file", "auto"
    )

    def attention_comfy_kitchen_int8(q, k, v, heads, **kwargs):
        return q

    def choosing(optimized_attention):
        return lambda _, *args, **kwargs: optimized_attention(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = choosing(attention_comfy_kitchen_int8)
    load_models_gpu([model])
    assert fact("attention").here.endswith("comfy-kitchen's int8 in WAN21, as a node requests")
    assert "--use-ck-attention" not in fact("attention").switch
    monkeypatch.setattr(here, "args", SimpleNamespace(use_ck_attention=False, vram_headroom=1, fast_disk=False))
    monkeypatch.setattr(here, "_of_gpu", lambda switch: switch)
    assert fact("attention").switch.endswith("--use-ck-attention")
    families.unload_models()


@pytest.mark.parametrize("profile", ["this device", "sm_75"])
def test_device_info_tells_them_of_this_device_alone(comfy, profile):
    text, data = comfy.run("HalfsafeDeviceInfo", profile=profile)
    assert ("What ComfyUI does here" in text) == ("comfyui" in json.loads(data)) == (profile == "this device")
