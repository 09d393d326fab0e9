"""The arithmetic modes: one table, in the contract's order, and nothing beside it that spells their names."""

import ast
import math
from pathlib import Path
from typing import get_args

import pytest
import torch
from halfsafe.precision.base.modes import FP16, FP16_WIDE, MODE_OF, MODES, ModeName, modes_named
from halfsafe.precision.base.options import COMPUTE_OPTIONS
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.compute import plan_compute
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.rules import Rules

ROOT = Path(__file__).absolute().parents[3]
ONLY_MODES = {"fp16_acc16", "fp16_wide", "fp16_scaled"}
FACTS = ModelFacts([LayerSpec("layer", "Linear", (32, 32))], 1024, "fp16", ("fp16", "bf16", "fp32"))


def test_the_modes_are_the_contracts_in_its_order():
    assert list(MODES) == ["fp8", "int8", "fp16_acc16", "fp16", "fp16_wide", "fp16_scaled", "bf16", "fp32"]
    assert all(name == mode.name for name, mode in MODES.items()) and tuple(MODES) == get_args(ModeName)


def exponent_of(dtype: torch.dtype | None) -> int:
    """The exponent of a dtype's largest number; 0 for a result in the dtype of the activations, and for whole numbers."""
    return math.frexp(torch.finfo(dtype).max)[1] if dtype and dtype.is_floating_point else 0


def test_each_mode_is_nearer_to_fp32_than_those_before_it():
    """Two escalations of a layer are joined by this order: a mode that is added has its place in it."""
    places = [
        (
            not mode.is_8bit,
            not mode.sums_in_fp16,
            exponent_of(mode.result),
            exponent_of(mode.operand),
            mode.operand.itemsize,
        )
        for mode in MODES.values()
        if mode.name != "int8"
    ]
    assert places == sorted(places) and list(MODES)[1] == "int8"


def test_a_compute_option_asks_for_the_plain_mode_of_its_rule():
    assert MODE_OF == {
        "fp8": "fp8", "int8": "int8", "fp16": "fp16", "fp16_safe": "fp16_wide", "bf16": "bf16", "fp32": "fp32",
    }  # fmt: skip
    assert set(MODE_OF) == {*COMPUTE_OPTIONS} - {"auto"}


@pytest.mark.parametrize("option", ["fp16", "fp16_safe", "bf16", "fp32"])
def test_a_plan_runs_its_layers_in_the_mode_of_the_option(option):
    plan = plan_compute(FACTS, detect(torch.device("cpu"), profile="sm_86"), option, Rules(), {})
    modes = {decision.mode for decision in plan.decisions.values()} or {plan.activation_dtype}
    assert modes == {MODE_OF[option]}


def test_what_a_matmul_reads_and_returns_decides_what_may_act_on_it():
    assert [name for name, mode in MODES.items() if mode.is_wide] == ["fp16_wide", "fp16_scaled"]
    assert [name for name, mode in MODES.items() if mode.is_8bit] == ["fp8", "int8"]
    assert [name for name, mode in MODES.items() if mode.is_16bit] == [
        "fp16_acc16",
        "fp16",
        "fp16_wide",
        "fp16_scaled",
        "bf16",
    ]


def test_a_dtype_that_is_no_mode_is_left_out():
    assert modes_named(["fp64", "fp16", "fp16_wide"]) == [FP16, FP16_WIDE]


def test_modes_have_colours_of_their_own():
    assert len({mode.colour for mode in MODES.values()}) == len({mode.label for mode in MODES.values()}) == len(MODES)


def strings_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_other_file_spells_a_modes_name():
    code = [*(ROOT / "precision").rglob("*.py"), *(ROOT / "nodes").rglob("*.py")]
    spelled = [path.relative_to(ROOT) for path in code if path.stem != "modes" and strings_in(path) & ONLY_MODES]
    assert not spelled


def test_the_page_spells_modes_names_where_it_words_them_alone():
    pages = [path for path in (ROOT / "web").iterdir() if path.is_file()]
    assert [path.name for path in pages if any(name in path.read_text(encoding="utf-8") for name in ONLY_MODES)] == [
        "dom.mjs"
    ]
