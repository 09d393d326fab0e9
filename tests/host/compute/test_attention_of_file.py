"""The attention kernel that a model's file asks for, as ComfyUI 0.38 reads it (`ComfyAttention` of `ldm/modules/attention.py`): named, and told where a plan takes its place.

The pinned ComfyUI has neither the class nor its argument: stand-ins do what they do there.
"""

import comfy.ldm.wan.model as wan
import pytest
import torch
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.families import load, report, with_compute

OF_FILE = "attention of the file"
PLANS = {
    "plain": ("bf16", "", True), "safe": ("fp16_safe", "", False), "ruled": ("bf16", "blocks.1 attention=fp32", False),
    "a layer in fp32": ("bf16", "blocks.0.ffn.0 compute=fp32", True), "a wide stream": ("bf16", "blocks.0.ffn.0 stream=fp32", False),
}  # fmt: skip


class ComfyAttention(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.config, self.function = {"attention": "comfy_kitchen_int8"}, function


@pytest.fixture
def model(comfy, models_dir, monkeypatch):
    """A small Wan each of whose self attentions prefers a kernel, and the calls of that kernel."""
    path = families.write_narrow("wan", models_dir / "diffusion_models")
    loaded, ran, own = load(comfy, path, "bf16", "bf16"), [], wan.optimized_attention

    def kernel(*args, **kwargs):
        ran.append(kwargs["heads"])
        return own(*args, **kwargs)

    def attention(*args, transformer_options, **kwargs):
        overridden = "optimized_attention_override" in transformer_options
        return (own if overridden else kernel)(*args, transformer_options=transformer_options, **kwargs)

    for block in loaded.model.diffusion_model.blocks:
        block.self_attn.comfy_attention = ComfyAttention(kernel)
    monkeypatch.setattr(wan, "optimized_attention", attention)
    call = families.capture(loaded, "wan")
    ran.clear()
    return loaded, call, ran


@pytest.mark.parametrize("plan", PLANS)
def test_the_kernel_of_a_file_is_named_whether_it_runs_or_not(comfy, model, plan):
    loaded, call, ran = model
    compute, rules, _ = PLANS[plan]
    planned = with_compute(comfy, loaded, compute, rules_from(rules))
    families.replay(planned, call)
    found = report(comfy, planned)
    reasons = [entry["reason"] for entry in found["without_effect"] if entry["setting"] == OF_FILE]
    count = len(loaded.model.diffusion_model.blocks)
    assert (
        bool(ran) == (not reasons) == (found["decisions"].get(OF_FILE) == f"comfy_kitchen_int8 in {count} attentions")
    )
    assert bool(ran) is PLANS[plan][2]
    assert any(note.startswith("comfy-kitchen's int8 attention is chosen") for note in found["notes"]) is bool(ran)
    assert all("own instead" in reason and f"comfy_kitchen_int8 in {count} attentions" in reason for reason in reasons)


def test_a_kernel_that_the_device_does_not_have_is_told(comfy, model):
    loaded, _, _ = model
    for block in loaded.model.diffusion_model.blocks:
        block.self_attn.comfy_attention.function = None
    (entry,) = (entry for entry in report(comfy, loaded)["without_effect"] if entry["setting"] == OF_FILE)
    assert "does not support" in entry["reason"]
