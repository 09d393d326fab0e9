"""The guard's check on models that predict something else than the noise: EDM, v, flow and x0."""

import re

import pytest
import torch
from halfsafe.nodes.host.facts.layers import top_level_parts
from halfsafe.nodes.host.guard.drift import DriftCheck
from support import rare_families
from support.families import load
from support.guarding import guarded, report_of

FAMILIES = ("svd", "cosmos1", "cosmos2", "anima", "cogvideox", "kandinsky5", "stable_cascade")
BLOCK = re.compile(r"^\w*blocks?\.\w+")


@pytest.fixture(scope="module")
def files(models_dir):
    """family -> its file."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = rare_families.write(family, models_dir / "diffusion_models" / f"checked_{family}.safetensors")
        return made[family]

    return get


def noisy_attention(function, q, k, v, heads, *args, **kwargs):
    """An attention kernel of 16 bit with noise in its result."""
    result = function(q, k, v, heads, *args, **kwargs)
    noise = torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(result)
    return result if v.dtype == torch.float32 else result + 0.5 * result.std() * noise


def checked(comfy, model, family):
    """The events and checks of a run whose last checked step has a low noise level: CogVideoX' input is as large as that."""
    model = guarded(comfy, model, check="every 5th step")
    rare_families.sample(model, family, steps=6)
    report = report_of(model)
    print("\nchecked", family, [(check.arithmetic, check.snr_db, check.threshold_db, check.left_out) for check in report.checks])
    assert [check.step for check in report.checks] == [0, 5] and not any(check.left_out for check in report.checks)
    return report.events


@pytest.mark.parametrize("family", FAMILIES)
def test_a_noisy_attention_is_named_with_its_block_and_a_clean_one_is_silent(comfy, files, family):
    plain = load(comfy, files(family), "bf16", "bf16")
    assert checked(comfy, plain, family) == []
    plain.model_options["transformer_options"]["optimized_attention_override"] = noisy_attention
    events = checked(comfy, plain, family)
    print([(event.layer, event.op, event.evidence) for event in events])
    assert {event.kind for event in events} == {"drift"}
    assert [event.step for event in events] == ([5] if family == "cogvideox" else [0, 5])
    for event in events:
        assert event.op == "attention by noisy_attention" and BLOCK.search(event.layer)


def test_a_call_that_drifts_is_told_where_the_search_for_its_cause_fails(comfy, files, monkeypatch):
    plain = load(comfy, files("kandinsky5"), "bf16", "bf16")
    plain.model_options["transformer_options"]["optimized_attention_override"] = noisy_attention

    def fails(check, whole):
        raise RuntimeError("no such dtype")

    monkeypatch.setattr(DriftCheck, "_in_a_block", fails)
    for event in checked(comfy, plain, "kandinsky5"):
        assert (event.kind, event.layer, event.op) == ("drift", "", "cause not found")
        assert event.snr_db < event.threshold_db and "no such dtype" in event.evidence and event.advice


ITEMS = {
    "cosmos1": {"blocks.block0", "t_embedder.1"},
    "cosmos2": {"blocks.0", "t_embedder.1"},
    "anima": {"blocks.0", "t_embedder.1", "llm_adapter.blocks.0"},
    "stable_cascade": {"down_blocks.0.0", "up_blocks.1.2", "down_downscalers.1"},
    "svd": {"input_blocks.1.0", "time_embed"},
}


@pytest.mark.parametrize("family", ITEMS)
def test_every_part_of_a_model_is_called(comfy, files, family):
    plain, called = load(comfy, files(family), "bf16", "bf16"), set()
    parts = top_level_parts(plain.model.diffusion_model)
    for name, part in parts.items():
        part.register_forward_hook(lambda module, args, result, name=name: called.add(name))
    rare_families.sample(plain, family, steps=1)
    uncalled = {name for name in parts.keys() - called if any(True for _ in parts[name].parameters())}
    assert parts.keys() >= ITEMS[family] and {name for name in uncalled if "llm_adapter" not in name} == set()
