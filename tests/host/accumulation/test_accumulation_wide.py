"""fp16 products with fp32 results, which cuBLAS refuses while fp16 accumulation is on: none meets it, in a real ComfyUI."""

from unittest import mock

import pytest
import torch
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.base import flags
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.compiling import compiled
from support.families import load, report, with_compute
from support.guarding import guarded, plain_fp16
from support.summing import FP16_ACCUMULATION, accumulation, started_with, states
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.usefixtures("flags_as_before", "ampere")
PLAIN_FFN, WIDE_FFN = "blocks.0.ffn.* compute=fp16", "blocks.0.ffn.* compute=fp16_safe"
FP16_SUMS = "* accumulation=fp16"
MIXED = {"mostly wide": ("fp16_safe", PLAIN_FFN), "mostly plain": ("fp16", WIDE_FFN)}


class FlagSpy(TorchFunctionMode):
    """Lists the Linear products of what runs inside: whether it is one of ``fp16_safe`` with an fp32 result, its dtype, the exact state of each flag."""

    def __init__(self):
        super().__init__()
        self.seen, self._in_wide, self._real = [], False, SafeOperation._multiplied

    def __enter__(self):
        def product(operation, x, weight, *args, **kwargs):
            self._in_wide = operation.kind == "linear" and x.dtype == weight.dtype == torch.float16
            try:
                return self._real(operation, x, weight, *args, **kwargs)
            finally:
                self._in_wide = False

        self._patch = mock.patch.object(SafeOperation, "_multiplied", product)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is linear or function is torch.addmm:
            self.seen.append((self._in_wide, args[-2 if function is torch.addmm else 0].dtype, states()))
        return function(*args, **(kwargs or {}))

    @property
    def wide(self):
        """Of each product of ``fp16_safe``, whether fp16 accumulation was on."""
        return [flag_states[FP16_ACCUMULATION] for wide, _, flag_states in self.seen if wide]

    @property
    def plain(self):
        """The same of the other products with an fp16 result."""
        return [
            flag_states[FP16_ACCUMULATION]
            for wide, dtype, flag_states in self.seen
            if not wide and dtype == torch.float16
        ]


def spied(model, call, calls=2):
    with FlagSpy() as spy:
        for _ in range(calls):
            families.replay(model, call)
    return spy


@pytest.fixture
def fast():
    """ComfyUI as started with --fast fp16_accumulation."""
    with started_with([FP16_ACCUMULATION], True):
        yield


def in_scope(comfy, model):
    entry = report(comfy, model)["flags"][FP16_ACCUMULATION]
    return entry["in_scope"], entry["outside"], entry["reason"]


def test_fp16_safe_in_a_comfyui_that_sums_in_fp16(comfy, wan, call, fast):
    model = load(comfy, wan, "as_file", "fp16_safe")
    for _ in range(2):
        spy = spied(model, call)
        assert spy.wide and not any(spy.wide)
        inside, outside, reason = in_scope(comfy, model)
        assert (inside, outside) == (False, True) and "return fp32" in reason
        assert flags.is_on(FP16_ACCUMULATION) is True


@pytest.mark.parametrize("order", ["compute first", "compute last"])
def test_fp16_safe_with_fp16_accumulation_asked_for(comfy, wan, call, order):
    model = load(comfy, wan, "as_file", "bf16")
    if order == "compute first":
        ours = accumulation(comfy, with_compute(comfy, model, "fp16_safe"), fp16_accumulation="on")
    else:
        ours = with_compute(comfy, accumulation(comfy, model, fp16_accumulation="on"), "fp16_safe")
    spy = spied(ours, call)
    assert spy.wide and not any(spy.wide)
    assert any(entry["setting"] == f"{FP16_ACCUMULATION}=on" for entry in report(comfy, ours)["without_effect"])
    assert in_scope(comfy, ours)[:2] == (False, False)


@pytest.mark.parametrize("plan", MIXED)
def test_in_a_mixed_plan_each_layer_sums_as_it_can(comfy, wan, call, plan, fast):
    compute, rule = MIXED[plan]
    model = with_compute(comfy, load(comfy, wan, "fp16", "fp16"), compute, rules_from(rule))
    for ours in (model, accumulation(comfy, model, fp16_accumulation="on")):
        spy = spied(ours, call)
        assert spy.wide and not any(spy.wide) and spy.plain and all(spy.plain)


@pytest.mark.parametrize("plan", MIXED)
def test_a_rule_for_fp16_sums_does_not_reach_wide_layers(comfy, wan, call, plan):
    compute, rule = MIXED[plan]
    model = with_compute(comfy, load(comfy, wan, "fp16", "fp16"), compute, rules_from(f"{rule}\n{FP16_SUMS}"))
    spy = spied(model, call)
    assert spy.wide and not any(spy.wide) and spy.plain and all(spy.plain)


@pytest.mark.parametrize("plan", MIXED)
def test_several_devices_agree_on_fp32_sums(comfy, wan, call, plan, fast):
    """Threads side by side have one flag between them: what a layer sums in must not depend on what the other does."""
    compute, rule = MIXED[plan]
    model = with_compute(comfy, load(comfy, wan, "fp16", "fp16"), compute, rules_from(rule))
    model = accumulation(comfy, model, fp16_accumulation="on")
    model.is_multigpu_base_clone = True
    spy = spied(model, call)
    assert spy.wide and spy.plain and not any(spy.wide + spy.plain)
    assert in_scope(comfy, model)[:2] == (False, True)


@pytest.mark.parametrize("kind", ["ffn", "residual", "embedding"])
@pytest.mark.parametrize("asked", ["by ComfyUI", "by the node"])
def test_what_the_guard_repeats_and_widens(comfy, models_dir, kind, asked):
    path = families.files_in(models_dir / "diffusion_models", "wide")("wan", kind)
    model = guarded(comfy, plain_fp16(comfy, path))
    if asked == "by the node":
        model = accumulation(comfy, model, fp16_accumulation="on")
    with started_with([FP16_ACCUMULATION], asked == "by ComfyUI"):
        for _ in range(2):
            with FlagSpy() as spy:
                families.sample(model, "wan", steps=2)
            assert spy.wide and not any(spy.wide)


@pytest.mark.parametrize("asked", ["by ComfyUI", "by the node"])
def test_layers_that_the_guard_left_alone_sum_as_asked_beside_those_it_widened(comfy, wan, call, asked):
    model = guarded(comfy, plain_fp16(comfy, wan))
    if asked == "by the node":
        model = accumulation(comfy, model, fp16_accumulation="on")
    families.replay(model, call)
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.wider({"blocks.0.ffn.2": "fp16_wide", "text_embedding.0": "fp16_wide"}))
    with started_with([FP16_ACCUMULATION], asked == "by ComfyUI"):
        spy = spied(model, call)
    assert spy.wide and not any(spy.wide) and spy.plain and all(spy.plain)


class Graphs:
    """A backend that notes the flag whenever a compiled graph runs."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph, inputs):
        def run(*args):
            self.seen.append(flags.is_on(FP16_ACCUMULATION))
            return graph.forward(*args)

        return run


@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        pytest.param("mostly wide", ["diffusion_model"], marks=pytest.mark.release),
        ("mostly plain", ["diffusion_model.blocks.0", "diffusion_model.blocks.1"]),
        ("all wide", ["diffusion_model"]),
    ],
)
def test_compiled_graphs_run_with_the_flag_off_if_any_layer_is_wide(comfy, wan, call, plan, keys, fast):
    compute, rule = MIXED.get(plan, ("fp16_safe", ""))
    graphs = Graphs()
    model = with_compute(comfy, load(comfy, wan, "fp16", "fp16"), compute, rules_from(rule) if rule else None)
    for ours in (model, accumulation(comfy, model, fp16_accumulation="on")):
        ours = compiled(ours, keys, graphs)
        for _ in range(3):
            families.replay(ours, call)
        assert in_scope(comfy, ours)[:2] == (False, True)
    assert graphs.seen and not any(graphs.seen)


def test_quality_allows_split_k_in_every_product(comfy, wan, call, fast):
    model = comfy.run("HalfsafeAutoPrecision", model=load(comfy, wan, "as_file", "bf16"), goal="quality")[0]
    spy = spied(model, call)
    assert spy.seen and spy.wide
    for _, _, in_product in spy.seen:
        pairs = [in_product[f"{name}_reduced_precision_reduction"] for name in ("fp16", "bf16")]
        assert [pair if isinstance(pair, tuple) else (pair, True) for pair in pairs] == [(False, True)] * 2
        assert (
            in_product[FP16_ACCUMULATION] is False
            and flags.SETTINGS["tf32_matmul"].is_on(in_product["tf32_matmul"]) is False
        )
    entry = report(comfy, model)["flags"]["reduced_precision_reduction"]
    assert entry["in_scope"] is False and "added in fp32" in entry["reason"]


def test_fp16_safe_as_a_simulated_device_without_fp32_results_sums_in_fp32_too(comfy, wan, call, fast, monkeypatch):
    from halfsafe.precision.arithmetic import linear as operations

    monkeypatch.setattr(operations, "has_wide_output", lambda device, kind: False)
    spy = spied(load(comfy, wan, "as_file", "fp16_safe"), call)
    assert spy.wide and {dtype for wide, dtype, _ in spy.seen if wide} == {torch.float16} and not any(spy.wide)
