"""The speeds of 8 bits beside 16 bit that are kept of a measurement."""

from dataclasses import replace

from halfsafe.precision.base.message import messages_in
from halfsafe.precision.base.modes import MODE_OF
from halfsafe.precision.devices.measurements import gains_in, told, told_here
from halfsafe.precision.study.speeds import speeds_beside_16_bit
from halfsafe.precision.study.tradeoffs import Measurements, Tradeoff, settings_from


def row(text: str, seconds: float, spread: float = 0.0, mode: str = "", **more) -> Tradeoff:
    (setting,) = settings_from(text)
    mode = mode or MODE_OF[setting.compute]
    return Tradeoff(setting, setting.storage, seconds, 100, None, 40.0, modes={mode: 3}, spread=spread, **more)


BF16, FP16 = row("as_file/bf16", 1.0, 0.02), row("as_file/fp16", 1.2, 0.02)
INT8, UNPACKED = row("int8/auto", 0.5, 0.01, "int8"), row("fp8_e4m3fn/auto", 1.1, 0.0, "bf16")
FP8 = row("fp8_e4m3fn/fp8", 0.8)


def found(*rows: Tradeoff) -> Measurements:
    about = "RTX 30xx (Ampere)", "WAN21", "bf16", "bf16", [], (1, 16, 1, 64, 64), 7
    return Measurements(*about, row("as_file/fp32", 4.0), rows, "bf16", True, ("NVIDIA RTX 3090", "580.1", "2.11.0"))


def speeds(*rows: Tradeoff) -> dict[str, tuple[float, float]]:
    return {one.setting: one.ratio for one in speeds_beside_16_bit(found(*rows), "2026-11-29")}


def test_each_storage_is_compared_with_the_fastest_16_bit_row_and_the_spread_is_the_range() -> None:
    assert speeds(BF16, FP16, INT8, UNPACKED, FP8) == {
        "int8": (round(0.98 / 0.51, 2), round(1.02 / 0.49, 2)),
        "fp8 unpacked": (round(0.98 / 1.1, 2), round(1.02 / 1.1, 2)),
        "fp8": (round(0.98 / 0.8, 2), round(1.02 / 0.8, 2)),
    }


def test_a_row_that_ranks_nothing_is_not_kept() -> None:
    noisy, failed = replace(INT8, spread=0.2), replace(INT8, problem="out of memory")
    assert speeds(BF16, noisy) == speeds(BF16, failed) == speeds(INT8) == speeds(replace(BF16, spread=0.5), INT8) == {}


def test_int8_that_was_unpacked_is_a_setting_of_its_own() -> None:
    unpacked = replace(INT8, modes={"bf16": 3}, seconds=1.0)
    assert list(speeds(BF16, unpacked)) == ["int8 unpacked"]
    assert list(speeds(BF16, unpacked, INT8)) == ["int8 unpacked", "int8"]


def test_a_range_of_ratios_is_worded_by_the_page() -> None:
    assert messages_in(told("sm_86", "int8"))["1.10 to 2.00"] == {
        "template": "{0} to {1}",
        "values": {"0": "1.10", "1": "2.00"},
    }


def test_what_is_told_names_the_day_the_model_and_the_figures() -> None:
    rows = speeds_beside_16_bit(found(BF16, INT8, UNPACKED), "2026-11-29")
    assert told_here(rows) == (
        "Measured on this card on 2026-11-29 (WAN21): int8 1.92 to 2.08 of 16 bit, fp8 unpacked 0.89 to 0.93 of 16 bit."
    )
    assert gains_in(rows) == {"int8": True, "fp8 unpacked": False} and told_here([]) == ""
