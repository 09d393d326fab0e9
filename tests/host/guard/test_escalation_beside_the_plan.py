"""The guard's rung ``fp16_safe`` beside the plan's own fallback of that name: two kinds of plan, one arithmetic."""

import pytest
from halfsafe.nodes.host.compute.per_model import runs_in
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.measures import relative_error

RULED = "blocks.0.ffn.0"


@pytest.fixture(autouse=True)
def falls_back(monkeypatch):
    """``auto`` takes plain fp16 with a fallback."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")


def on_the_rung(model):
    """The model, in whose calls the guard runs ``fp16_safe``."""
    model.pre_run()
    guarded = Guard.on(model).states.of(model.model)
    guarded.grow(guarded.plan.safe())
    return model


@pytest.mark.parametrize("rules", ["", f"{RULED} compute=fp32", f"{RULED} stream=fp32"])
@pytest.mark.parametrize("storage", ["fp16", "fp8_e4m3fn"])
def test_where_no_weight_multiplies_quantized_the_rung_gives_the_bits_of_the_plans_fallback(
    comfy, wan, call, monkeypatch, storage, rules
):
    model = families.load(comfy, wan, storage, "auto", rules_from(rules))
    plain = families.replay(model, call)
    with monkeypatch.context() as patch:
        patch.setattr(runs_in(model.model), "fallback", True)
        fallback = families.replay(model, call)
    rung = families.replay(on_the_rung(model), call)
    assert relative_error(fallback, rung) == 0 < relative_error(fallback, plain)
