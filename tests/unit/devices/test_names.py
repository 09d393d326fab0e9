"""Devices by the names that people know."""

import os

import pytest
from halfsafe.precision.base.errors import UnknownProfile
from halfsafe.precision.devices import names
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.names import code_of, drop_wrong_name
from halfsafe.precision.devices.profiles import PROFILE_NAMES


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("rtx 3060", "sm_86"), ("NVIDIA GeForce RTX 3060 12GB", "sm_86"), ("RTX 3080 Ti Laptop GPU", "sm_86"), ("A40", "sm_86"),
        ("RTX A6000", "sm_86"), ("4090", None), ("RTX 4090", "sm_89"), ("rtx-4070-ti-super", "sm_89"), ("L40S", "sm_89"),
        ("RTX 6000 Ada Generation", "sm_89"), ("Quadro RTX 6000", "sm_75"), ("gtx 1080", "sm_61"), ("GTX 1080 Ti", "sm_61"),
        ("T4", "sm_75"), ("Tesla T4", "sm_75"), ("NVIDIA A100-SXM4-40GB", "sm_80"), ("NVIDIA H100 80GB HBM3", "sm_90"), ("NVIDIA H100 PCIe", "sm_90"), ("Tesla V100-SXM2-16GB", "sm_70"), ("RTX PRO 6000 Blackwell Workstation Edition", "sm_120"), ("rtx 2060 super", "sm_75"), ("V100", "sm_70"), ("a100 80GB", "sm_80"),
        ("H100", "sm_90"), ("B200", "sm_100"), ("RTX 5090", "sm_120"), ("RTX PRO 6000 Blackwell", "sm_120"), ("MI300X", "gfx942"),
        ("rx 7900", "gfx1100"), ("AMD Radeon RX 7900 XTX", "gfx1100"), ("RX 9070 XT", "gfx1201"), ("m2", "mps_m1"), ("Apple M2 Max", "mps_m1"),
        ("M4 Pro", "mps_m3"), ("Intel Arc B580", "xpu"), ("arc a770 16GB", "xpu"), ("b580", "xpu"), ("CPU", None), ("cpu", "cpu"),
        ("sm_86", "sm_86"), (" gfx1100 ", "gfx1100"), ("gtx 1660", None), ("rx 6800", None), ("rtx", None), ("", None), ("rtx 30600", None),
    ],
)  # fmt: skip
def test_names_lead_to_their_row(name, code):
    if code is None:
        with pytest.raises(UnknownProfile, match=r"Use a code \(sm_61.*such as rtx 3060"):
            code_of(name)
    else:
        assert code_of(name) == code


def test_every_row_has_a_name_and_every_name_a_row():
    assert {code for code, _ in names._CALLED} | {"cpu"} == set(PROFILE_NAMES)
    assert all(code_of(name) in PROFILE_NAMES for name in names.EXAMPLES.split(", "))


def test_the_variable_takes_a_name_too(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "RTX 2080 Ti")
    assert detect().profile.name == "sm_75" and drop_wrong_name("HALFSAFE_DEVICE_PROFILE") is None
    assert os.environ["HALFSAFE_DEVICE_PROFILE"] == "RTX 2080 Ti"


def test_a_wrong_variable_is_taken_off_and_told(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "rtx 9999")
    said = drop_wrong_name("HALFSAFE_DEVICE_PROFILE")
    assert said.startswith("HALFSAFE_DEVICE_PROFILE=rtx 9999 is ignored.") and "sm_86" in said
    assert "HALFSAFE_DEVICE_PROFILE" not in os.environ and not detect().simulated
