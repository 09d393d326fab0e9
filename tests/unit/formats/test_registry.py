"""The table of quantization formats is the only one: what asks it follows a new row."""

from dataclasses import replace

import pytest
import torch
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.dtypes import COMPUTE_OPTIONS, FP8_NAMES, QUANTIZED_NAMES, STORAGE_OPTIONS
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE as ROWS
from halfsafe.precision.formats.registry import FORMATS, fp8_dtypes, row_of
from halfsafe.precision.modes import FP8, INT8
from halfsafe.precision.plan.auto import auto_storage
from halfsafe.precision.plan.compute import WEIGHTS_FOR, plan_compute
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.rules import Rules
from halfsafe.precision.report.view import STORAGE_COLOURS
from support import dialects


def test_a_row_is_found_by_its_name_and_by_its_storage():
    assert all(row.name == name for name, row in FORMATS.items()) and all(row.storage == storage for storage, row in ROWS.items())
    assert {row.name for row in ROWS.values()} == set(FORMATS)
    for name, row in FORMATS.items():
        alike = [other.bits for other in ROWS.values() if other.name == name]
        assert len(alike) == len(set(alike)) and (len(alike) == 1 or all(alike)), "what tells them apart"
        assert row_of(name, row.bits * 4, 32) is row


def test_every_format_has_a_writer_in_the_tests():
    assert {*dialects.NATIVE, *FP8_NAMES} == set(ROWS)


def test_every_storage_has_a_colour_of_its_own():
    assert set(ROWS) | {"fp16", "bf16", "fp32"} == set(STORAGE_COLOURS)
    assert len(set(STORAGE_COLOURS.values())) == len(STORAGE_COLOURS)


def test_what_can_be_made_here_is_an_option_and_a_format():
    assert QUANTIZED_NAMES == ("fp8_e4m3fn", "fp8_e5m2", "int8", "w6a8", "w4a8") and set(QUANTIZED_NAMES) <= {*STORAGE_OPTIONS} & ROWS.keys()
    assert WEIGHTS_FOR == {"fp8": FP8_NAMES, "int8": ("int8", "w6a8", "w4a8")} and set(WEIGHTS_FOR) <= set(COMPUTE_OPTIONS)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_scales_that_a_file_holds_as_bytes_are_tensors_of_the_format(row):
    assert row.byte_scale is None or row.byte_scale[0] in row.encoding.needs
    assert bool(fp8_dtypes(row.storage)) == ("float8" in str((row.encoding.dtypes, row.byte_scale)))
    assert all(hasattr(torch, name) for name in fp8_dtypes(row.storage) if name != "float8_e8m0fnu")


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_device_without_fp8_keeps_the_files_that_need_none(row):
    apple = detect(profile="mps_m1")  # holds e4m3 from torch 2.15
    device = replace(apple, capabilities={**apple.capabilities, "fp8_storage": False})
    storage, reason = auto_storage(device, 1 << 30, row.storage, None)
    assert (storage == "as_file") == (not fp8_dtypes(row.storage)) and row.storage in reason


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_dtype_asked_for_unpacks_exactly_the_formats_that_multiply_quantized_operands(row):
    facts = ModelFacts([LayerSpec("layer", "Linear", (64, 64))], 64 * 64, "bf16", ("fp16", "bf16", "fp32"))
    found = plan_compute(facts, detect(profile="sm_80"), "bf16", Rules(), {"layer": row.storage}).decisions
    assert ("layer" in found) == (row.quantizes_operands and row.mode is not FP8)
    assert row.quantizes_operands == ("a16" not in row.name)
    assert "layer" not in found or f"its {row.storage} weight is dequantized" in found["layer"].reason


def test_modes_of_products_are_those_of_8_bit_operands():
    assert {row.mode for row in ROWS.values()} == {FP8, INT8, None}
    assert [row.name for row in ROWS.values() if row.mode is FP8] == [row.name for row in ROWS.values() if not row.product]
