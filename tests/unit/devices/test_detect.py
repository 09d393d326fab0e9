"""Every profile row, how hardware is matched to one, and what auto decides. Expectations are copied from documents."""

import dataclasses
import json
import os
import types

import pytest
import torch
from halfsafe.precision.base.dtypes import DTYPES
from halfsafe.precision.base.errors import UnknownProfile
from halfsafe.precision.base.message import Message
from halfsafe.precision.devices import detect as devices
from halfsafe.precision.devices import hardware, probes, profiles
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.plan import auto
from support.page_words import untranslated
from support.probing import missed_expectations
from support.shipped import ROOT

# fp16 fast, bf16 native, fp8 storage, e4m3fn matmul, fp8 matmul gains, fp16 accumulation gains, fast accumulation,
# int8 matmul, int8 kernels, int8 matmul gains
TABLE = {
    "sm_61": (0, 0, 1, 0, 0, 0, 0, 0, 0, 0),
    "sm_70": (1, 0, 1, 0, 0, 0, 0, 0, 0, 0),
    "sm_75": (1, 0, 1, 0, 0, 1, 0, 1, 1, 0),
    "sm_80": (1, 1, 1, 0, 0, 0, 0, 1, 1, 0),
    "sm_86": (1, 1, 1, 0, 0, 1, 0, 1, 1, 1),
    "sm_89": (1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    "sm_90": (1, 1, 1, 1, 0, 0, 1, 1, 1, 0),
    "sm_100": (1, 1, 1, 1, 1, 0, 0, 1, 1, 0),
    "sm_120": (1, 1, 1, 1, 0, 1, 0, 1, 1, 1),
    "gfx90a": (1, 1, 1, 0, 0, 0, 0, 1, 0, 0),
    "gfx942": (1, 1, 1, 0, 0, 0, 0, 1, 0, 0),
    "gfx1100": (1, 1, 1, 0, 0, 0, 0, 1, 1, 0),
    "gfx1201": (1, 1, 1, 1, 0, 0, 0, 1, 1, 0),
    "mps_m1": (1, 0, 1, 1, 0, 0, 0, 1, 0, 0),
    "mps_m3": (1, 1, 1, 1, 0, 0, 0, 1, 0, 0),
    "xpu": (1, 1, 1, 1, 0, 0, 0, 0, 0, 0),
    "cpu": (0, 0, 1, 0, 0, 0, 0, 1, 0, 0),
}
CONTRACT = tuple(TABLE)
COLUMNS = (
    "fp16", "bf16", "fp8_storage", "fp8_matmul", "fp8_matmul_gains", "fp16_accumulation", "fp8_fast_accumulation",
    "int8_matmul", "int8_kernels", "int8_matmul_gains",
)  # fmt: skip

WAN = ("fp16", "bf16", "fp32")
QWEN = ("bf16", "fp32")
FLUX = ("bf16", "fp16", "fp32")
GIB = 1024**3


@pytest.fixture(autouse=True)
def no_profile_asked_for(monkeypatch):
    monkeypatch.delenv("HALFSAFE_DEVICE_PROFILE", raising=False)


@pytest.fixture
def newest_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.15.0")


@pytest.fixture
def cuda(monkeypatch):
    """Pretend to have a card: call with a compute capability and a name, or a gcnArchName."""

    def pretend(capability=(8, 6), name="NVIDIA GeForce RTX 3090", arch=None, results=()):
        monkeypatch.setattr(torch.version, "hip", "6.4" if arch else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        properties = types.SimpleNamespace(gcnArchName=arch, name=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(devices, "run_probes", lambda device, fp8_format: results)
        return torch.device("cuda", 0)

    return pretend


def test_every_row_matches_the_device_table_and_has_a_sentence_for_every_capability(newest_torch):
    assert profiles.PROFILE_NAMES == CONTRACT, "in its order"
    for name in CONTRACT:
        row = profiles.profile_named(name)
        assert tuple(row.capabilities) == COLUMNS
        assert tuple(int(on) for on in row.capabilities.values()) == TABLE[name]
        for capability in COLUMNS:
            reason = row.reason(capability)  # a range of measurements names its cards
            assert reason.endswith(".") and len(reason) < (200 if capability in profiles.GAINS else 120), reason
        assert set(row.notes) <= {*COLUMNS, "compile", "denormals", "nvfp4", "order", "products"}


@pytest.mark.parametrize(
    ("name", "version", "capability", "on"),
    [
        ("mps_m3", "2.8.0", "fp8_storage", True),
        ("mps_m3", "2.15.0.dev20260912", "fp8_matmul", True),
        ("mps_m1", "2.14.1", "fp8_matmul", False),
        ("sm_86", "2.6.0+cu124", "fp16_accumulation", False),
        ("sm_86", "2.7.0+cu128", "fp16_accumulation", True),
        ("xpu", "2.9.0", "fp8_matmul", False),
        ("xpu", "2.10.0", "fp8_matmul", True),
        ("mps_m3", "2.14.1", "int8_matmul", False),
        ("mps_m3", "2.15.0", "int8_matmul", True),
    ],
)
def test_a_capability_waits_for_the_torch_that_has_it(name, version, capability, on, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    row = profiles.profile_named(name)
    assert row.capabilities[capability] is on
    assert ("Needs torch" in row.reason(capability)) is not on


def test_another_name_than_a_code_lists_the_codes():
    for name in ("rtx 3060", "CPU", "", "sm_99"):
        with pytest.raises(UnknownProfile, match=rf"'{name}'.*one of: sm_61, sm_70.*gfx1201.*cpu"):
            profiles.profile_named(name)


@pytest.mark.parametrize(
    ("capability", "row"),
    [
        ((5, 2), "sm_61"), ((6, 0), "sm_61"), ((6, 1), "sm_61"), ((7, 0), "sm_70"), ((7, 2), "sm_70"),
        ((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((11, 0), "sm_100"), ((12, 0), "sm_120"), ((12, 1), "sm_120"),
        ((13, 0), "sm_120"),
    ],
)  # fmt: skip
def test_compute_capabilities_go_to_the_nearest_row_and_those_outside_the_table_are_told(capability, row):
    found = hardware._nvidia_row(capability)
    told = {(5, 2): "sm_52 is older than", (13, 0): "sm_130 is newer than"}.get(capability, "")
    assert found.name == row and told in " ".join(found.remarks) and ("match" in found.notes) is bool(told)


AMD = {  # architecture: row, bf16, fp8 matmul, int8 matmul, int8 kernels
    "gfx90a:sramecc+:xnack-": ("gfx90a", 1, 0, 1, 0),
    "gfx908": ("gfx90a", 1, 0, 1, 0),
    "gfx942": ("gfx942", 1, 0, 1, 0),
    "gfx940": ("gfx942", 1, 0, 1, 0),
    "gfx950": ("gfx942", 1, 1, 1, 0),
    "gfx1100": ("gfx1100", 1, 0, 1, 1),
    "gfx1151": ("gfx1100", 1, 0, 1, 1),
    "gfx1200": ("gfx1201", 1, 1, 1, 1),
    "gfx1201": ("gfx1201", 1, 1, 1, 1),
    "gfx1030": ("gfx1100", 0, 0, 0, 0),
    "gfx906": ("gfx1100", 0, 0, 0, 0),
    "gfx1300": ("gfx1100", 1, 0, 1, 1),
}


@pytest.mark.parametrize("arch", AMD)
def test_amd_architectures(arch, cuda, newest_torch):
    device = devices.detect(cuda(arch=arch, name="AMD Radeon"))
    able = (device.capabilities[name] for name in ("bf16", "fp8_matmul", "int8_matmul", "int8_kernels"))
    assert (device.profile.name, *able) == AMD[arch]
    assert device.capabilities["fp16"] and not device.capabilities["fp16_accumulation"]


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1660 SUPER", "NVIDIA GeForce GTX 1650", "NVIDIA T1000 8GB"])
def test_gtx_16_cards_compute_nothing_in_fp16(name, cuda):
    device = devices.detect(cuda((7, 5), name))
    assert not device.capabilities["fp16"] and not device.capabilities["fp16_accumulation"]
    assert "wrong or NaN" in device.reason("fp16")
    assert device.capabilities["int8_kernels"] and device.profile.gain("int8") is None
    assert auto.auto_compute(device, WAN, "fp16")[0] == "fp32"


def test_directml_has_fp16_and_none_of_what_its_types_lack():
    row = hardware.profile_of(torch.device("privateuseone", 0))
    assert [name for name, on in row.capabilities.items() if on] == ["fp16"] and row.label == "DirectML"
    for capability in COLUMNS:
        assert row.reason(capability).endswith(".") and "CPU" not in row.reason(capability)
    device = dataclasses.replace(
        devices.detect(torch.device("cpu")),
        profile=row,
        capabilities=row.capabilities,
        reasons={name: row.reason(name) for name in COLUMNS},
    )
    for supported in (WAN, FLUX, QWEN):
        assert auto.auto_compute(device, supported, "bf16")[0] == "fp16_safe"


@pytest.mark.parametrize(
    ("capability", "name", "gains"),
    [
        ((7, 5), "Tesla T4", False), ((8, 6), "NVIDIA RTX A6000", False), ((8, 6), "NVIDIA A10", False),
        ((8, 9), "NVIDIA L40S", False), ((8, 9), "NVIDIA RTX 6000 Ada Generation", False),
        ((8, 6), "NVIDIA GeForce RTX 3090", True), ((8, 9), "NVIDIA GeForce RTX 4090", True),
        ((12, 0), "NVIDIA GeForce RTX 5090 Laptop GPU", True), ((8, 6), "NVIDIA GeForce RTX 3060 Ti", True),
    ],
)  # fmt: skip
def test_only_geforce_gains_from_fp16_accumulation(capability, name, gains, cuda):
    assert devices.detect(cuda(capability, name)).capabilities["fp16_accumulation"] is gains


@pytest.mark.parametrize(
    ("metal", "row"),
    [
        ("Apple M1", "mps_m1"), ("Apple M2 Ultra", "mps_m1"), ("Apple M3 Pro", "mps_m3"), ("Apple M4", "mps_m3"),
        ("Apple M12", "mps_m3"), ("AMD Radeon Pro 5500M", "mps_m1"), ("", "mps_m1"),
    ],
)  # fmt: skip
def test_apple_chips(metal, row, monkeypatch):
    monkeypatch.setattr(hardware, "_metal_name", lambda: metal)
    found = hardware.profile_of(torch.device("mps"))
    assert found.name == row
    assert bool(found.remarks) is ("Apple" not in metal)
    assert hardware.hardware_name(torch.device("mps")) == (metal or "Apple GPU")


@pytest.mark.parametrize("native", [True, False])
def test_the_cpu_row_follows_its_instructions(native, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: native)
    row = hardware.profile_of(torch.device("cpu"))
    assert (row.name, row.bf16) == ("cpu", native)


def test_a_device_type_without_a_row_gets_the_safest_and_a_note():
    row = hardware.profile_of(torch.device("meta"))
    assert row.name == "cpu" and "'meta'" in row.remarks[0]


def test_the_environment_variable_simulates_a_profile_on_the_real_hardware(monkeypatch):
    monkeypatch.setattr(devices, "run_probes", lambda *_: pytest.fail("a simulated profile is not probed"))
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    device = devices.detect(torch.device("cpu"))
    assert (device.profile.name, device.simulated, device.probes) == ("sm_75", True, ())
    assert device.torch_device == torch.device("cpu")
    assert device.name == hardware.hardware_name(torch.device("cpu"))
    assert device.capabilities["fp16"] and not device.capabilities["bf16"]


def test_a_wrong_environment_variable_is_named_and_can_be_taken_off(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "rtx9999")
    with pytest.raises(UnknownProfile, match=r"HALFSAFE_DEVICE_PROFILE=rtx9999.*sm_89"):
        devices.detect()
    said = devices.drop_wrong_profile()
    assert said.startswith("HALFSAFE_DEVICE_PROFILE=rtx9999: ") and "sm_86" in said and said.endswith("ignored.")
    assert "HALFSAFE_DEVICE_PROFILE" not in os.environ and not devices.detect().simulated


def test_a_profile_asked_for_beats_the_variable(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", " sm_75 ")
    assert devices.detect().profile.name == "sm_75" and devices.drop_wrong_profile() is None
    assert (
        devices.detect(profile="sm_120").profile.name == "sm_120" and os.environ["HALFSAFE_DEVICE_PROFILE"] == " sm_75 "
    )


@pytest.mark.parametrize(
    ("failing", "off"),
    [
        ("fp8_cast", {"fp8_storage", "fp8_matmul", "fp8_matmul_gains", "fp8_fast_accumulation"}),
        ("fp8_matmul", {"fp8_matmul", "fp8_matmul_gains", "fp8_fast_accumulation"}),
        ("fp16_gemm", {"fp16", "fp16_accumulation"}),
        ("bf16_gemm", {"bf16"}),
        ("bf16_native", {"bf16"}),
        ("fp16_accumulation", {"fp16_accumulation"}),
        ("int8_matmul", {"int8_matmul", "int8_kernels", "int8_matmul_gains"}),
        ("int8_kernels", {"int8_kernels", "int8_matmul_gains"}),
    ],
)
def test_a_failing_probe_turns_its_capabilities_off_and_says_so(failing, off, cuda):
    card = cuda((8, 9), "NVIDIA GeForce RTX 4090", results=(probes.Probe(failing, False, "gave zeros"),))
    device = devices.detect(card)
    assert sorted(missed_expectations(card)) == sorted(f"{name}: {failing}: gave zeros" for name in off), (
        "the GPU tier's test sees it"
    )
    assert {name for name, on in device.capabilities.items() if not on} == off
    for capability in off:
        assert failing in device.reason(capability) and "gave zeros" in device.reason(capability)


@pytest.mark.parametrize(
    "detail",
    [Message("torch {0} has no such flag", "2.6"), Message("{0}.", Message("torch {0} has no such flag", "2.6"))],
)
def test_what_a_failed_probe_found_is_said_in_chinese(cuda, detail):
    device = devices.detect(cuda((8, 9), results=(probes.Probe("fp8_cast", False, detail),)))
    assert untranslated(device.reason("fp8_storage")) == [] and not device.reason("fp8_storage").endswith("..")


@pytest.mark.parametrize("ok", [True, None])
def test_a_probe_that_passes_or_cannot_tell_leaves_the_table(ok, cuda):
    results = tuple(probes.Probe(name, ok, "") for name in ("fp8_cast", "fp8_matmul", "fp16_gemm", "bf16_gemm"))
    device = devices.detect(cuda((8, 6), results=results))
    assert device.capabilities == profiles.profile_named("sm_86").capabilities


def test_mi300_is_probed_with_its_own_format(cuda, monkeypatch):
    asked = []
    device = cuda(arch="gfx942")
    monkeypatch.setattr(devices, "run_probes", lambda device, fp8_format: asked.append(fp8_format) or ())
    devices.detect(device)
    assert asked == ["fp8_e4m3fnuz"]


def test_a_model_that_prefers_fp32_keeps_it_where_bf16_is_native():
    row = devices.detect(profile="sm_86")
    assert auto.auto_compute(row, ("fp32", "bf16"), "fp32")[0] == "fp32"


def test_an_fp16_file_is_computed_in_fp16_where_the_model_allows_it():
    row = devices.detect(profile="sm_86")
    assert (
        auto.auto_compute(row, FLUX, "fp16")[0]
        == auto.auto_compute(devices.detect(profile="sm_75"), FLUX, "fp16")[0]
        == "fp16"
    )
    assert auto.auto_compute(devices.detect(profile="sm_75"), FLUX, "bf16")[0] == "fp16_safe"
    assert auto.auto_compute(devices.detect(profile="gfx1100"), FLUX, "fp16")[0] == "bf16"
    assert auto.auto_compute(devices.detect(profile="mps_m1"), FLUX, "fp16")[0] == "fp16_safe"
    assert auto.auto_compute(row, QWEN, "fp16")[0] == "bf16"
    assert auto.auto_compute(devices.detect(profile="sm_61"), FLUX, "fp16")[0] == "fp32"


def test_auto_compute_follows_the_probe_not_the_table(cuda):
    zeros = probes.Probe("fp16_gemm", False, "fp16 matmul gives zeros")
    device = devices.detect(cuda((8, 6), results=(zeros,)))
    assert auto.auto_compute(device, WAN, "bf16")[0] == "bf16"


def test_storage_auto_of_files_that_fit_and_of_those_that_are_quantized():
    for profile, gib, file_dtype, free, storage in (
        ("sm_86", 5, "fp16", 8, "as_file"), ("sm_86", 22, "bf16", 24, "as_file"), ("sm_86", 23, "bf16", 24, "int8"),
        ("sm_61", 26, "fp16", 24, "fp8_e4m3fn"), ("sm_86", 26, "fp8_e4m3fn", 8, "as_file"), ("sm_86", 26, "nvfp4", 8, "as_file"),
        ("sm_86", 26, "quantized", 8, "as_file"), ("sm_86", 26, "bf16", None, "as_file"), ("sm_86", 10, "fp32", 24, "as_file"),
        ("sm_86", 15, "fp32", 24, "bf16"), ("sm_75", 15, "fp32", 24, "fp16"), ("sm_86", 30, "fp32", 24, "int8"),
    ):  # fmt: skip
        device, free_bytes = devices.detect(profile=profile), free and free * GIB
        chosen, reason = auto.auto_storage(device, gib * GIB, file_dtype, free_bytes)
        assert chosen == storage and reason.endswith("."), (profile, gib, file_dtype)


def test_storage_auto_takes_fp8_where_the_kernels_of_int8_are_missing_and_says_why(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    card = torch.device("cuda", 0)
    device = devices.detect(cuda((8, 6), results=(probes.Probe("int8_kernels", *probes.CHECKS["int8_kernels"](card)),)))
    storage, reason = auto.auto_storage(device, 26 * GIB, "bf16", 24 * GIB)
    assert storage == "fp8_e4m3fn" and "Not int8:" in reason and "built for CUDA 12.8" in reason
    assert "built for CUDA 12.8" in auto.why_int8_is_slow(device)


@pytest.mark.parametrize(
    ("capability", "name", "figure"),
    [
        ((9, 0), "NVIDIA H200", "H200 0.33, H200 0.67"),
        ((10, 0), "NVIDIA B200", "GB200"),
        ((10, 3), "NVIDIA B300 SXM6 AC", "0.15 against 2.25"),
    ],
)
def test_data_center_cards_store_fp8_where_it_gains_and_else_int8_for_its_error(cuda, capability, name, figure):
    device = devices.detect(cuda(capability, name))
    assert not device.capabilities["int8_matmul_gains"]
    assert figure in auto.why_int8_is_slow(device)
    storage, reason = auto.auto_storage(device, 26 * GIB, "bf16", 24 * GIB)
    assert storage == ("int8" if "H200" in name else "fp8_e4m3fn") and figure in reason


@pytest.mark.parametrize(("profile", "storage"), [("mps_m1", "fp16"), ("mps_m3", "bf16")])
def test_an_fp8_file_is_widened_where_fp8_tensors_do_not_work(profile, storage):
    row = devices.detect(profile=profile)
    without = row.without("fp8_storage", "No fp8 here.")
    chosen, reason = auto.auto_storage(without, 26 * GIB, "fp8_e4m3fn", 64 * GIB)
    assert chosen == storage and "No fp8 here." in reason
    assert auto.auto_storage(without, 26 * GIB, "bf16", 24 * GIB)[0] == "int8"
    assert auto.auto_storage(without, 26 * GIB, "int8", 24 * GIB)[0] == "as_file"


@pytest.mark.parametrize("profile", ["mps_m1", "mps_m3"])
def test_a_mac_keeps_8_bits_with_any_torch_and_promises_no_speed(profile, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    row = devices.detect(profile=profile)
    for storage in ("fp8_e4m3fn", "fp8_e5m2", "int8"):
        assert auto.auto_storage(row, 26 * GIB, storage, 64 * GIB)[0] == "as_file"
        assert auto.auto_storage(row, 26 * GIB, "bf16", 24 * GIB)[0] == "int8"
    assert not row.capabilities["fp8_matmul_gains"] and not row.capabilities["int8_matmul_gains"]
    assert "simulated" in row.reason("fp8_storage")


def test_torch_versions_are_read_from_any_build_name(monkeypatch):
    for version, expected in (("2.3.1+cu121", (2, 3)), ("2.15.0a0+git1234", (2, 15)), ("2.10.0.dev20251001", (2, 10))):
        monkeypatch.setattr(torch, "__version__", version)
        assert profiles.torch_version() == expected


CARDS_OF = {"sm_70": ("V100",), "sm_75": ("T4", "2080 Ti"), "sm_80": ("A100",), "sm_86": ("3090",), "sm_89": ("4090",), "sm_90": ("H200",), "sm_100": ("B200",), "sm_120": ("5090",)}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CONTRACT if name.startswith("sm_")])
def test_the_cost_of_fp16_safe_is_the_one_that_was_counted(name):
    models = json.loads((ROOT / "benchmarks" / "results" / "cost.json").read_text(encoding="utf-8"))["models"].values()
    found = [round(100 * (model["to_fp16"][card] - 1)) for model in models for card in CARDS_OF.get(name, ())]
    assert profiles.profile_named(name).fp16_safe_cost == (f"{min(found)} to {max(found)} %" if found else "")


def test_each_fp8_dtype_that_a_device_cannot_hold_is_asked_of_it(monkeypatch):
    monkeypatch.setattr(
        devices,
        "why_dtype_not_held",
        lambda device, name, is_cast=False: "no such dtype" if name in ("float8_e5m2", "float8_e8m0fnu") else "",
    )
    here = dataclasses.replace(devices.detect(profile="cpu"), simulated=False)
    found = {storage: why for storage in {**FORMAT_OF_STORAGE, **DTYPES} if (why := here.refuses(storage))}
    assert (
        set(found) == {"fp8_e5m2", "mxfp8"}
        and found["fp8_e5m2"] == f"not on {here.label}: It does not support float8_e5m2 (no such dtype)."
        and found["mxfp8"]
        == f"not on {here.label}: torch does not cast the float8_e8m0fnu scales of blocks there (no such dtype)."
    )
    assert auto.held_storage(here, "mxfp8")[0] in ("fp16", "bf16") and auto.held_storage(here, "nvfp4")[0] == "as_file"
