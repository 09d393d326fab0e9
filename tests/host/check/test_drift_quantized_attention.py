"""Attention with quantized operands, of ComfyUI and of KJNodes: named in a report where it runs, compared with fp32 where no node could ask for that, and named where it may be at fault."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import comfy.ldm.modules.attention as attention
import comfy.ldm.wan.model as wan_model
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch, wrap_attn
from halfsafe.nodes.host.check import attention as unasked
from halfsafe.precision.check import attention as core
from halfsafe.precision.devices.detect import detect
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


def noisy(name: str, ran: list):
    """A kernel whose result is noise of the right size."""
    exact = kernel(name, ran)

    def run(*args, **kwargs):
        result = exact(*args, **kwargs)
        return result.float().std() * torch.randn(result.shape).to(result)

    run.__name__ = name
    return run


def started_with(monkeypatch, function) -> None:
    """Have ComfyUI's own attention be a function, as its switches do."""
    wrapped = wrap_attn(function)
    wrapped.__name__ = function.__name__
    for module in (attention, wan_model):
        monkeypatch.setattr(module, "optimized_attention", wrapped)


@pytest.fixture
def on(monkeypatch):
    """Set the device that the checks see."""
    return lambda profile: monkeypatch.setattr(unasked, "current_device", lambda: detect(profile=profile))


def evidence(model) -> list[tuple[str, str]]:
    return [(event.evidence, event.advice) for event in report_of(model).events]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("by", ["a node", "the command line"])
def test_noise_on_amd_is_found_unasked_and_names_the_kernel_and_another(
    comfy, plain, monkeypatch, on, name, by
) -> None:
    on("gfx1100")
    ran: list = []
    if by == "a node":
        model = chosen(plain, noisy(name, ran))
    else:
        started_with(monkeypatch, noisy(name, ran))
        model = plain
    model = guarded(comfy, model, "9")
    families.sample(model, "wan", steps=2)
    ((told, advice),) = evidence(model)
    assert ran and told.startswith(f"{NAMED[name]} attention is ") and " dB from the same attention in fp32" in told
    assert ("Remove the node" in advice) is (by == "a node")
    switch = {"attention_sage": "--use-sage-attention", "attention_comfy_kitchen_int8": "--use-ck-attention"}.get(name)
    if by != "a node" and switch:
        assert f"--use-pytorch-cross-attention in place of {switch}" in advice
    (check,) = report_of(model).checks
    assert (
        check.snr_db < 3
        and report_of(model).extra_calls == 0
        and check.threshold_db == (5 if name == "attention3_sage" else 10)
    )


@pytest.mark.parametrize(("name", "profile"), [("attention_sage", "sm_120"), ("attention_pytorch", "gfx1100")])
def test_neither_a_short_call_elsewhere_nor_an_exact_attention_is_checked(comfy, plain, on, name, profile) -> None:
    on(profile)
    model = guarded(comfy, chosen(plain, noisy(name, [])), "9")
    families.sample(model, "wan", steps=1)
    assert not report_of(model).checks and not report_of(model).events


def test_a_call_with_many_tokens_is_checked_on_each_device(comfy, plain, monkeypatch, on) -> None:
    on("sm_120")
    tokens: set = set()

    def attention_sage(q, k, v, heads, *args, **kwargs):
        tokens.update({q.shape[-2], k.shape[-2]})
        return attention_pytorch(q, k, v, heads, *args, **kwargs)

    families.sample(chosen(plain, attention_sage), "wan", steps=1)
    for least, checks in ((max(tokens), 0), (max(tokens) - 1, 1)):
        monkeypatch.setattr(core, "MANY_TOKENS", least)
        model = guarded(comfy, chosen(plain, noisy("attention_sage", [])), "9")
        families.sample(model, "wan", steps=1)
        assert len(report_of(model).checks) == len(report_of(model).events) == checks, (least, tokens)
    assert f"with {max(tokens):,} tokens" in evidence(model)[0][0]


def test_a_kernel_is_checked_once_for_a_model_and_a_size(comfy, plain, on) -> None:
    on("gfx1201")
    model = guarded(comfy, chosen(plain, kernel("attention_sage", [])), "9")

    def checks(**options) -> list:
        families.sample(model, "wan", steps=2, **options)
        assert not report_of(model).events
        return report_of(model).checks

    (check,) = checks()
    assert check.snr_db > 30 and check.step == 0
    assert checks(seed=3) == [], "another seed is no other setting"
    assert len(checks(size=16)) == 1, "another size"


def test_noise_is_told_in_each_run_once(comfy, plain, on) -> None:
    on("gfx1201")
    model = guarded(comfy, chosen(plain, noisy("attention_sage", [])), "9")
    for _ in range(2):
        families.sample(model, "wan", steps=3)
        assert [check.step for check in report_of(model).checks] == [0] and len(report_of(model).events) == 1


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp16_safe", "fp32"])
def test_the_check_changes_no_picture(comfy, wan, on, compute) -> None:
    on("gfx1100")
    model = chosen(load(comfy, wan, "bf16", compute), kernel("attention_sage", []))
    alone = families.sample(model, "wan", steps=2)
    checked = guarded(comfy, model, "9")
    assert torch.equal(families.sample(checked, "wan", steps=2), alone)
    assert len(report_of(checked).checks) == 1


OF_A_PACK = """
import torch

def choosing(attention_sage):
    def override(function, q, k, v, heads, *args, **kwargs):
        narrow = torch.eye(q.shape[-1], dtype=torch.bfloat16)
        return attention_sage(q @ narrow, k, v, heads, *args, **kwargs)
    return override
"""


@pytest.mark.parametrize("compute", ["fp16_safe", "fp32"])
def test_an_override_of_another_pack_keeps_its_border(comfy, wan, on, tmp_path, compute) -> None:
    """It multiplies by a bf16 tensor, which torch refuses for fp32 where no border of ours casts both."""
    on("gfx1100")
    file = tmp_path / "custom_nodes" / "foreign_attention.py"
    file.parent.mkdir()
    file.write_text(OF_A_PACK)
    own = runpy.run_path(str(file))
    model = load(comfy, wan, "bf16", compute).clone()
    options = model.model_options["transformer_options"]
    options["optimized_attention_override"] = own["choosing"](kernel("attention_sage", ran := []))
    alone = families.sample(model, "wan", steps=1)
    assert ran and torch.equal(families.sample(guarded(comfy, model, "9"), "wan", steps=1), alone)


def test_a_kernel_that_the_file_requests_is_not_replaced(comfy, plain, monkeypatch, on) -> None:
    """As in ComfyUI 0.38, whose ``wrap_attn`` runs it only without an override (``tests/host/compute/test_attention_of_file.py``)."""
    on("gfx1100")
    overridden: list = []

    def attention_sage(*args, transformer_options=None, **kwargs):
        overridden.append("optimized_attention_override" in (transformer_options or {}))
        return attention_pytorch(*args, **kwargs)

    class ComfyAttention(torch.nn.Module):
        config, function = {"attention": "comfy_kitchen_int8"}, attention_sage

    monkeypatch.setattr(attention, "optimized_attention", attention_sage)
    monkeypatch.setattr(wan_model, "optimized_attention", attention_sage)
    model = guarded(comfy, plain, "9")
    families.sample(model, "wan", steps=1)
    assert any(overridden), "without a kernel of the file it is compared"
    overridden.clear()
    model.model.diffusion_model.blocks[0].self_attn.add_module("comfy_attention", ComfyAttention())
    families.sample(guarded(comfy, plain, "9"), "wan", steps=1)
    assert overridden and not any(overridden)


def test_a_guard_before_the_node_that_chooses_the_attention_checks_it(comfy, plain, on) -> None:
    on("gfx1100")
    model = chosen(guarded(comfy, plain, "9"), noisy("attention_sage", []))
    families.sample(model, "wan", steps=1)
    assert len(evidence(model)) == 1


def comparing() -> unasked._AttentionCheck:
    """A check of each attention that it is given."""
    check = unasked._AttentionCheck.__new__(unasked._AttentionCheck)
    check.least, check.powers, check.tokens = 0, [], []
    return check


def test_repeats_of_the_call_are_not_compared() -> None:
    check, options = comparing(), {"a": 1}
    check.call, check.found = SimpleNamespace(options=options), lambda is_right: None
    with pytest.raises(KeyError), check.watching():
        assert check.call.options.keys() > options.keys()
        raise KeyError
    assert check.call.options is options


def test_an_argument_whose_meaning_is_not_known_is_not_compared() -> None:
    def attention_sage(q, k, v, heads, *args, top_k=None, **kwargs):
        return attention_pytorch(q, k, v, heads, *args, **kwargs)

    q, check = torch.randn(1, 8, 16), comparing()
    check._compared(attention_pytorch, attention_sage, q, q, q, 2, top_k=0.5)
    assert not check.powers
    check._compared(attention_pytorch, attention_sage, q, q, q, 2)
    assert len(check.powers) == 1


@pytest.mark.parametrize(
    "shapes", ["tokens", "heads", "heads in and out", "shared keys", "a mask of keys", "a mask of rows", "a scale"]
)
def test_each_layout_of_an_attention_is_compared(shapes) -> None:
    q, k = torch.randn(2, 10, 32), torch.randn(2, 6, 32)
    more = {
        "tokens": {},
        "heads": {"skip_reshape": True},
        "heads in and out": {"skip_reshape": True, "skip_output_reshape": True},
        "shared keys": {"enable_gqa": True},
        "a mask of keys": {"mask": torch.randn(2, 1, 6)},
        "a mask of rows": {"mask": torch.rand(10, 6) > 0.2},
        "a scale": {"scale": 0.1},
    }[shapes]
    if more.get("skip_reshape"):
        q, k = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q, k))
    k = k[..., :16] if shapes == "shared keys" else k
    check = comparing()
    check._compared(attention_pytorch, attention_pytorch, q, k, torch.randn_like(k), 4, **more)
    assert core.farthest(torch.stack(check.powers).tolist(), check.tokens)[0] > 100


def test_no_memory_for_the_comparison_is_told_and_the_call_goes_on(comfy, plain, monkeypatch, on) -> None:
    on("gfx1100")

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(core, "beside_fp32", full)
    model = guarded(comfy, chosen(plain, kernel("attention_sage", [])), "9")
    families.sample(model, "wan", steps=1)
    (check,) = report_of(model).checks
    assert "Not enough memory" in check.left_out and not report_of(model).events


def test_a_comparison_that_had_no_memory_is_made_in_the_next_run(comfy, plain, monkeypatch, on) -> None:
    on("gfx1100")

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = guarded(comfy, chosen(plain, noisy("attention_sage", [])), "9")
    with monkeypatch.context() as crowded:
        crowded.setattr(core, "beside_fp32", full)
        families.sample(model, "wan", steps=1)
    assert not evidence(model)
    families.sample(model, "wan", steps=1)
    assert evidence(model)


@pytest.mark.parametrize(("name", "is_told"), [("attention_sage", True), ("attention3_sage", False)])
def test_a_kernel_of_4_bits_may_be_farther_from_fp32_than_one_of_8(comfy, plain, on, name, is_told) -> None:
    on("gfx1100")

    def coarse(q, k, v, heads, *args, **kwargs):
        result = attention_pytorch(q, k, v, heads, *args, **kwargs)
        return result + 10 ** (-7.5 / 20) * result * torch.randn_like(result)

    coarse.__name__ = name
    model = guarded(comfy, chosen(plain, coarse), "9")
    families.sample(model, "wan", steps=1)
    (check,) = report_of(model).checks
    assert 5 < check.snr_db < 10 and bool(evidence(model)) is is_told, check


@pytest.mark.parametrize(
    ("node_id", "name", "checks"),
    [("halfsafe_4_0", "attention_sage", 1), ("halfsafe_4_0", "attention_pytorch", 0), ("4", "attention_sage", 0)],
)
def test_a_guard_without_an_input_for_it_compares_each_attention_of_quantized_operands(
    comfy, plain, node_id, name, checks
) -> None:
    """Guard every run adds such a guard. No call is repeated, and no attention."""
    ran: list = []
    model = guarded(comfy, chosen(plain, kernel(name, ran)), node_id)
    families.sample(model, "wan", steps=2)
    alone, ran_guarded = [], len(ran)
    families.sample(chosen(plain, kernel(name, alone)), "wan", steps=2)
    found = report_of(model)
    assert len(found.checks) == checks and found.extra_calls == 0 and ran_guarded == len(alone) > 0
    assert {*ran} == {torch.bfloat16} and not found.events


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_ends_in_an_error_or_interrupt_leaves_the_attention_to_be_compared(
    comfy, plain, monkeypatch, on, error
) -> None:
    on("gfx1201")
    wrong = noisy("attention_sage", [])

    def fails(*args, **kwargs):
        raise error

    fails.__name__ = wrong.__name__
    model = guarded(comfy, plain, "9")
    started_with(monkeypatch, fails)
    with pytest.raises(error):
        families.sample(model, "wan", steps=1)
    started_with(monkeypatch, wrong)
    families.sample(model, "wan", steps=1)
    assert evidence(model), "the next run compares it"
