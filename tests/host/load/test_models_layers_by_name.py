"""Classes of layers told from names alone: what convert and the text encoder loader quantize is a Linear in ComfyUI."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import comfy.ops
import comfy.sd1_clip
import comfy.text_encoders
import pytest
import torch
from comfy.text_encoders import gemma4
from halfsafe.precision.formats.checkpoint import Checkpoint, StoredWeight
from halfsafe.precision.plan.facts import layer_specs
from halfsafe.precision.plan.layers import plan_storage
from halfsafe.precision.plan.rules import rules_from

COMFY = Path(comfy.ops.__file__).parent
EMBEDDINGS = re.compile(r"self\.(\w+) = (?:\w+\.)?(?:Scaled)?Embedding\(")
BARE = {
    "double_stream_blocks.0.block.ff_i.gate.weight": "hidream/model.py MoEGate",
    "blocks.20.moe.gate.weight": "hunyuan3dv2_1/hunyuandit.py MoEGate",
    "layers.0.mlp.router.weight": "gpt_oss.py GptOssTopKRouter",
    "timestep_features.weight": "audio/dit.py FourierFeatures",
    "motion_encoder.enc.fc.0.weight": "wan/model_animate.py EqualLinear",
    "motion_encoder.dec.direction.weight": "wan/model_animate.py Direction",
}


def quantized(weights: dict[str, torch.Tensor], storage: str = "fp8_e4m3fn") -> set[str]:
    """The tensors that would be quantized with no rule to keep them."""
    stored = {name: StoredWeight(name, tensor) for name, tensor in weights.items()}
    layers = layer_specs(Checkpoint("", (), {}, stored, []))
    decisions = plan_storage(layers, storage, rules_from("", "none"))
    return {f"{name}.weight" for name, decision in decisions.items() if decision.storage == storage}


def linear(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = ((f"{name}.weight", module) for name, module in model.named_modules())
    return {name: module.weight for name, module in named if isinstance(module, comfy.ops.disable_weight_init.Linear)}


def encoders() -> list[type]:
    """Every text encoder of ComfyUI that is one transformer and can be built without a file."""
    modules = (
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(comfy.text_encoders.__path__, "comfy.text_encoders.")
    )
    found = {cls: None for module in modules for cls in vars(module).values() if inspect.isclass(cls)}
    bases = [
        cls
        for cls in found
        if issubclass(cls, comfy.sd1_clip.SDClipModel) and cls.__module__.startswith("comfy.text_encoders.")
    ]
    variants = [
        type(name, (gemma4.Gemma4Model,), {"model_class": getattr(gemma4, name)})
        for name in ("Gemma4_E2B", "Gemma4_12B")
    ]
    return [cls for cls in (*bases, *variants) if getattr(cls, "model_class", True)]


@pytest.mark.parametrize("cls", encoders(), ids=lambda cls: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}")
def test_of_a_text_encoder_linear_layers_alone_are_quantized(cls):
    options = {"custom_operations": comfy.ops.disable_weight_init}
    with torch.device("meta"):
        model = cls(device="meta", dtype=torch.bfloat16, model_options=options).transformer
    true, chosen = linear(model), quantized(model.state_dict())
    assert chosen <= true.keys()
    assert sum(true[name].numel() for name in chosen) > 0.95 * sum(weight.numel() for weight in true.values())


def test_every_lookup_table_that_comfyui_makes_is_known():
    names = {
        name: path.name
        for folder in ("ldm", "text_encoders")
        for path in (COMFY / folder).rglob("*.py")
        for name in EMBEDDINGS.findall(path.read_text(encoding="utf-8"))
    }
    assert len(names) > 20
    tables = {f"a.{name}.weight": torch.empty(64, 64, device="meta") for name in names}
    assert quantized(tables) == set()


def test_weights_that_are_a_module_s_own_parameter_are_no_linear_layers():
    assert quantized({name: torch.empty(8, 2048, device="meta") for name in BARE}) == set()
    assert quantized({"blocks.0.attn.gate.weight": torch.empty(2048, 2048, device="meta")}) == {
        "blocks.0.attn.gate.weight"
    }
