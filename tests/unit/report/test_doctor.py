"""What the doctor says about this machine and about every profile."""

import json
import os
import subprocess

import pytest
import torch
from halfsafe.precision.base import flags
from halfsafe.precision.devices import detect as devices
from halfsafe.precision.devices import probes
from halfsafe.precision.devices.measurements import MEASURED
from halfsafe.precision.devices.profiles import GAINS, PROFILE_NAMES
from halfsafe.precision.report import doctor
from halfsafe.precision.report.result import FAST
from support.probing import forget_probes

MODELS = ("Wan 2.1, 2.2", "SDXL", "Z-Image, Qwen-Image", "Flux")


@pytest.fixture(autouse=True)
def no_profile_asked_for(monkeypatch):
    monkeypatch.delenv("HALFSAFE_DEVICE_PROFILE", raising=False)


def chosen(diagnosis):
    return [entry["compute"] for entry in diagnosis["auto"]]


def test_a_diagnosis_is_json_and_complete():
    diagnosis = doctor.diagnose(torch.device("cpu"))
    assert json.loads(json.dumps(diagnosis, allow_nan=False)) == diagnosis
    assert set(diagnosis) == {
        "torch", "python", "system", "runtime", "device", "capabilities", "fp8", "int8",
        "remarks", "probes", "auto", "too_large", "flags",
    }  # fmt: skip
    assert diagnosis["torch"] == str(torch.__version__)
    assert diagnosis["device"]["profile"] == "cpu" and diagnosis["device"]["simulated"] is False
    assert [entry["name"] for entry in diagnosis["probes"]][:2] == ["fp8_cast", "fp8_matmul"]


def test_the_diagnosis_tells_table_from_probe(monkeypatch):
    failed = probes.Probe("fp8_cast", False, "RuntimeError: no kernel")
    monkeypatch.setattr(devices, "run_probes", lambda *_: (failed,))
    diagnosis = doctor.diagnose(torch.device("cpu"))
    entry = diagnosis["capabilities"]["fp8_storage"]
    assert (entry["table"], entry["value"]) == (True, False)
    assert "no kernel" in entry["reason"]
    assert "failed" in doctor.diagnosis_result(diagnosis).text


def test_a_simulated_profile_is_said_to_be_one(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    diagnosis = doctor.diagnose(torch.device("cpu"))
    text = doctor.diagnosis_result(diagnosis).text
    assert diagnosis["probes"] == [] and "simulated on" in text
    assert "Simulated profile: its expected values are used, and nothing was probed." in text


def test_every_profile_is_described_in_eighty_columns():
    for name in PROFILE_NAMES:
        description = doctor.diagnose(profile=name)
        text = doctor.diagnosis_result(description).text
        assert description["device"]["profile"] == name and description["device"]["simulated"]
        assert f"Profile {name}: " in text and "Backend flags" not in text
        assert [entry["model"] for entry in description["auto"]] == list(MODELS)
        assert max(len(line) for line in text.splitlines()) <= 80
        assert all(remark.split()[0] in text for remark in description["remarks"])
        json.dumps(description, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("sm_61", ["fp32", "fp32", "fp32", "fp32"]),
        ("sm_75", ["fp16", "fp16", "fp16_safe", "fp16_safe"]),
        ("sm_89", ["fp16", "fp16", "bf16", "bf16"]),
        ("gfx1100", ["bf16"] * 4),
        ("mps_m1", ["fp16_safe"] * 4),
    ],
)
def test_what_auto_chooses_for_typical_models(name, computes):
    assert chosen(doctor.diagnose(profile=name)) == computes


@pytest.mark.parametrize(
    ("name", "storage"), [("sm_86", "int8"), ("sm_61", "fp8_e4m3fn"), ("cpu", "as_file"), ("mps_m1", "as_file")]
)
def test_the_text_says_what_storage_auto_takes_and_why_int8_is_slow(name, storage):
    description = doctor.diagnose(profile=name)
    text, slow = " ".join(doctor.diagnosis_result(description).text.split()), description["int8"]["slow"]
    assert ("int8 models are not known to be faster here" in text) is bool(slow) and slow in text
    assert f"if 16 bit does not fit the GPU {storage} {description['too_large']['reason']}" in text


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_a_device_that_was_measured_is_described_by_every_figure_not_by_the_best(name):
    description = doctor.diagnose(profile=name)
    result = doctor.diagnosis_result(description)
    figures = [row for row in MEASURED.get(name, ()) if row.setting in GAINS.values()]
    _, second, *others = result.sentence.sentences
    assert (getattr(second, "template", second) == FAST) is bool(figures)
    assert all(f"{row.card} {row.times}" in " ".join(others) for row in figures)
    fast = [kind for kind in ("int8", "fp8") if description["capabilities"][f"{kind}_matmul_gains"]["value"]]
    assert not figures or [kind for kind in ("int8", "fp8") if kind in second.named["fast"].split(", ")] == fast
    assert bool(result.speed) == any(row.setting == "int8" and row.to == "16 bit" for row in figures)
    assert all(row.card in result.speed for row in figures if row.setting == "int8" and row.to == "16 bit")


def test_the_doctor_changes_no_flag_and_starts_no_process(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("started a process")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(os, "popen", refuse)
    forget_probes()
    before = {name: flags.state_of(name) for name in flags.SETTINGS}
    assert doctor.diagnosis_result(doctor.diagnose()).text
    assert {name: flags.state_of(name) for name in flags.SETTINGS} == before


def test_every_flag_is_in_the_text():
    text = doctor.diagnosis_result(doctor.diagnose(torch.device("cpu"))).text
    assert "Backend flags" in text
    assert all(f"  {name} " in text for name in flags.SETTINGS)
    assert max(len(line) for line in text.splitlines()) <= 80
