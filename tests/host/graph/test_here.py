"""What ComfyUI does here: five facts, each read from the ComfyUI that runs, with the switch that changes it."""

import json
from types import SimpleNamespace

import comfy.memory_management
import pytest
import torch
from comfy.model_management import load_models_gpu
from halfsafe.nodes.host.guard import encoders
from halfsafe.nodes.host.reporting import here
from halfsafe.precision.devices.detect import detect
from support import families, tiny_models

SWITCHES = {"kernels", "compiler", "dynamic VRAM", "attention", "loaded"}


def facts() -> list[SimpleNamespace]:
    return [SimpleNamespace(**one) for one in here.facts_here()]


def fact(what: str) -> SimpleNamespace:
    (found,) = (one for one in facts() if one.what == what)
    return found


def test_each_fact_has_a_switch_of_comfyui_on_a_gpu_and_none_elsewhere(comfy, monkeypatch):
    from comfy.cli_args import parser

    known = {option for action in parser._actions for option in action.option_strings}
    assert not any(one.switch for one in facts()), "nothing here would change anything"
    monkeypatch.setattr(here, "compute_device", lambda: torch.device("cuda"))
    found = facts()
    assert {one.what for one in found} == SWITCHES and len(found) == 5
    for one in found:
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


class Amd:
    """A ComfyUI that sees an AMD GPU, with comfy-kitchen's HIP backend."""

    def __init__(self, monkeypatch, arch: str, profile: str, **arguments):
        monkeypatch.setattr(here, "compute_device", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.version, "hip", "7.2")
        monkeypatch.setattr(torch.version, "cuda", None)
        of_gpu = SimpleNamespace(gcnArchName=f"{arch}:sramecc-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_gpu)
        monkeypatch.setattr(here, "current_device", lambda: detect(profile=profile))
        kitchen = SimpleNamespace(list_backends=lambda: {"hip": ON, "eager": ON})
        monkeypatch.setattr(here.comfy.quant_ops, "ck", kitchen)
        given = {"vram_headroom": 1, "fast_disk": False, "disable_comfy_compiler": False, "fast": set(), **arguments}
        monkeypatch.setattr(here, "args", SimpleNamespace(**given))
        self.monkeypatch = monkeypatch

    def attention(self, name: str) -> None:
        function = lambda: None  # noqa: E731
        function.__name__ = name
        self.monkeypatch.setattr(here, "optimized_attention", function)


ON = {"available": True, "disabled": False, "unavailable_reason": None, "capabilities": ["int8_linear"]}
SAYS = ("Triton's int8 products", "--fast: ", "AOTriton", "it crashed on")


def said() -> set[str]:
    told = " ".join(one.here for one in (fact("kernels"), fact("attention")))
    return {words for words in SAYS if words in told}


def test_each_sentence_for_amd_is_said_where_it_applies_alone(pack, monkeypatch):
    """The order of comfy-kitchen's backends on RDNA4; --fast; what ComfyUI falls back to; what crashed on gfx1151."""
    from comfy.cli_args import PerformanceFeature

    families.unload_models()
    assert said() == set(), "not on this CPU"
    rdna4 = Amd(monkeypatch, "gfx1201", "gfx1201")
    rdna4.attention("attention_pytorch")
    assert said() == {SAYS[0]} and here.NO_HIP in fact("kernels").switch
    rdna4.attention("attention_sub_quad")
    assert said() == {SAYS[0], SAYS[2]} and "for gfx1201 in this torch" in fact("attention").here
    Amd(monkeypatch, "gfx1034", "gfx1100", use_quad_cross_attention=True, fast={PerformanceFeature.Fp16Accumulation})
    assert said() == {SAYS[1]}, "sub-quadratic attention was requested"
    strix = Amd(monkeypatch, "gfx1151", "gfx1100", use_ck_attention=True, fast={PerformanceFeature.AutoTune})
    strix.attention("attention_comfy_kitchen_int8")
    assert said() == {SAYS[3]} and "--use-ck-attention" not in fact("attention").switch
    Amd(monkeypatch, "gfx1100", "gfx1100", use_ck_attention=True)
    assert said() == set() and "--use-ck-attention" in fact("attention").switch
    monkeypatch.setattr(here.comfy.quant_ops, "ck", SimpleNamespace(list_backends=dict))
    assert here.NO_HIP not in fact("kernels").switch, "without HIP kernels there is nothing to turn off"


def test_an_nvidia_card_is_told_none_of_it(pack, monkeypatch):
    from comfy.cli_args import PerformanceFeature

    Amd(monkeypatch, "", "sm_120", fast={PerformanceFeature.Fp16Accumulation}).attention("attention_sub_quad")
    monkeypatch.setattr(torch.version, "hip", None)
    assert said() == set()


def test_int8_caches_of_a_text_encoder_are_named(pack, monkeypatch):
    """As ComfyUI's Qwen 3.5 keeps keys and values of its attentions where its file or --use-ck-attention asks."""

    class Int8FixedKVCache: ...

    class FixedKVCache: ...

    class Attention(torch.nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def kv_cache_type(self, device, dtype):
            return self.kind if dtype == torch.bfloat16 else FixedKVCache

    encoder = torch.nn.Sequential(Attention(Int8FixedKVCache), Attention(FixedKVCache), Attention(Int8FixedKVCache))
    monkeypatch.setattr(here, "_models", lambda: [encoder])
    assert "Sequential keeps keys and values in int8 in 2 attentions" in fact("attention").here
    monkeypatch.setattr(here, "_models", lambda: [torch.nn.Sequential(Attention(FixedKVCache))])
    assert "int8" not in fact("attention").here
    patcher = SimpleNamespace(model=encoder, load_device=torch.device("cpu"))
    assert encoders._cache("generate", patcher) == "int8 KV cache" and encoders._cache("encode", patcher) == ""
