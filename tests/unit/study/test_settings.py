"""Candidates as text: pairs of options, errors by line, and what a device cannot do."""

import pytest
from halfsafe.precision.base.dtypes import COMPUTE_OPTIONS, STORAGE_OPTIONS
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.study.settings import Setting, settings_from, why_not


def test_lines_are_read_in_order_and_each_setting_once():
    text = "\n# first\nint8/auto  # small\n  FP8_e4m3fn / fp8 \nint8/auto\nauto/auto\r\n"
    assert settings_from(text) == [Setting("int8", "auto"), Setting("fp8_e4m3fn", "fp8"), Setting("auto", "auto")]
    every = [Setting(storage, compute) for storage in STORAGE_OPTIONS for compute in COMPUTE_OPTIONS]
    assert settings_from("\n".join(map(str, every))) == every


@pytest.mark.parametrize(("text", "words"), [
    ("auto/auto\nint8", "Candidates, line 2, int8: '' is not a compute option. Use one of: auto"),
    ("\n\nint8/auto/fp16", "line 3, int8/auto/fp16: 'auto/fp16' is not a compute option"),
    ("int4/auto", "line 1, int4/auto: 'int4' is not a storage option. Use one of: auto"),
    ("# ok\nint8/fp8_e4m3fn", "line 2, .*'fp8_e4m3fn' is not a compute option"), ("/fp16", "line 1, /fp16: '' is not a storage option"),
    ("fp9/auto\nint8/fp7", "line 1, .*'fp9' is not a storage option. .* line 2, .*'fp7' is not a compute option. Use .* as storage. Use .* as compute."),
    ("", "no candidate"), ("# nothing\n\n", "no candidate to measure. Write: <storage>/<compute>"),
])  # fmt: skip
def test_a_text_that_cannot_be_read_is_an_error_with_its_line(text, words):
    with pytest.raises(HalfsafeError, match=words):
        settings_from(text)


@pytest.mark.parametrize(("setting", "profile", "capability"), [
    ("as_file/bf16", "sm_75", "bf16"), ("as_file/fp16", "sm_61", "fp16"), ("as_file/fp16_safe", "sm_61", "fp16"),
    ("fp8_e4m3fn/fp8", "sm_86", "fp8_matmul"), ("int8/int8", "sm_70", "int8_matmul"),
])  # fmt: skip
def test_a_device_that_cannot_is_told_with_its_reason(setting, profile, capability):
    (asked,), device = settings_from(setting), detect(profile=profile)
    assert why_not(asked, device) == f"not on {device.label}: {device.reason(capability)}"
    assert why_not(asked, detect(profile="sm_100")) == "" == why_not(Setting("auto", "auto"), device)


def test_a_device_without_fp8_stores_none():
    device = detect(profile="sm_86").without("fp8_storage", "No fp8 here.")
    assert why_not(Setting("fp8_e5m2", "auto"), device).endswith("No fp8 here.") and not why_not(Setting("int8", "auto"), device)


@pytest.mark.parametrize("setting", ["as_file/bf16", "as_file/fp16", "auto/fp16_safe", "int8/int8", "fp8_e5m2/fp32"])
def test_a_cpu_is_measured_in_what_it_emulates(setting):
    assert why_not(*settings_from(setting), detect(profile="cpu")) == ""
