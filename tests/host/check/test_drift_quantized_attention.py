"""Attention with quantized operands, of ComfyUI and of KJNodes: named in a report where it runs, compared with fp32 where no node could ask for that, and named where it may be at fault."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.ldm.modules.attention as attention
import comfy.ldm.wan.model as wan_model
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch, wrap_attn
from support import families
from support.families import load, report
from support.guarding import int8_attention, report_of

NAMED = {
    "attention_comfy_kitchen_int8": "comfy-kitchen's int8",
    "attention_sage": "SageAttention's",
    "attention3_sage": "SageAttention 3's",
}


def kernel(name: str, ran: list, coarse: bool = False):
    """An attention that is called as ComfyUI's; `ran`: the dtype of each call."""

    def run(q, k, v, heads, *args, **kwargs):
        ran.append(q.dtype)
        result = attention_pytorch(q, k, v, heads, *args, **kwargs)
        step = result.abs().amax() / 2
        return (result / step).round() * step if coarse else result

    run.__name__ = name
    return run


def chosen(model, function):
    """A clone whose attention is chosen as by ComfyUI's ModelAttentionBackend: the override holds the function."""
    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = lambda _, *args, **kwargs: function(
        *args, **kwargs
    )
    return clone


def guarded(comfy, model, node_id: str, check: str = "off"):
    """The model of a NaN Guard with an id, as ComfyUI runs the node."""
    node = comfy.nodes["HalfsafeNaNGuard"]
    clone = node.PREPARE_CLASS_CLONE(None)
    clone.hidden = SimpleNamespace(unique_id=node_id)
    return clone.execute(model, "retry_higher", 8, check).args[0]


@pytest.fixture
def plain(comfy, wan):
    return load(comfy, wan, "bf16", "bf16")


def notes_on_attention(comfy, model) -> str:
    return "\n".join(note for note in report(comfy, model)["notes"] if "attention is chosen for this model" in note)


@pytest.mark.parametrize("name", NAMED)
def test_the_attention_that_a_node_chose_is_named_with_what_is_known_of_it(comfy, plain, name) -> None:
    ran: list = []
    model = chosen(plain, kernel(name, ran))
    families.sample(model, "wan", steps=1)
    note = notes_on_attention(comfy, model)
    assert ran and note.startswith(f"{NAMED[name]} attention ") and "set check to first step" in note
    assert ("more than 64 tokens" in note) is (name == "attention_comfy_kitchen_int8")
    assert "set check" not in notes_on_attention(comfy, guarded(comfy, model, "9", "first step")), "it is set"


@pytest.mark.parametrize("other", [attention_pytorch, int8_attention])
def test_nothing_is_said_of_an_attention_that_is_exact_or_unknown(comfy, plain, other) -> None:
    assert notes_on_attention(comfy, plain) == notes_on_attention(comfy, chosen(plain, other)) == ""


def test_the_attention_that_comfyui_was_started_with_is_named(comfy, plain, monkeypatch) -> None:
    ran: list = []
    sage = wrap_attn(kernel("attention_sage", ran))
    for module in (attention, wan_model):
        monkeypatch.setattr(module, "optimized_attention", sage)
    families.sample(plain, "wan", steps=1)
    assert ran and notes_on_attention(comfy, plain).startswith("SageAttention's")
    before = len(ran)
    families.sample(exact := chosen(plain, attention_pytorch), "wan", steps=1)
    assert len(ran) == before and notes_on_attention(comfy, exact) == "", "a node chose another"


def test_a_failed_check_names_it_as_what_may_be_the_cause(comfy, plain) -> None:
    ran: list = []
    for coarse, attend in ((True, kernel("attention_sage", ran, True)), (False, kernel("attention_sage", ran))):
        model = guarded(comfy, chosen(plain, attend), "9", "first step")
        families.sample(model, "wan", steps=1)
        evidence = [event.evidence for event in report_of(model).events]
        assert [
            ("SageAttention's attention quantizes its operands and may be the cause" in text) for text in evidence
        ] == [True] * coarse
    model = guarded(comfy, chosen(plain, kernel("of_another_pack", ran, True)), "9", "first step")
    families.sample(model, "wan", steps=1)
    (event,) = report_of(model).events
    assert "quantizes" not in event.evidence


@pytest.mark.parametrize(
    ("node_id", "name", "checks"),
    [("halfsafe_4_0", "attention_sage", 1), ("halfsafe_4_0", "attention_pytorch", 0), ("4", "attention_sage", 0)],
)
def test_a_guard_without_an_input_for_it_compares_the_first_step(comfy, plain, node_id, name, checks) -> None:
    """Guard every run adds such a guard. The call in fp32 runs ComfyUI's own attention: it adds none to those that ran."""
    ran: list = []
    model = guarded(comfy, chosen(plain, kernel(name, ran)), node_id)
    families.sample(model, "wan", steps=2)
    alone, ran_guarded = [], len(ran)
    families.sample(chosen(plain, kernel(name, alone)), "wan", steps=2)
    found = report_of(model)
    assert len(found.checks) == found.extra_calls == checks and ran_guarded == len(alone) > 0
    assert {*ran} == {torch.bfloat16} and not found.events
