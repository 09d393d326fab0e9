"""The folder for a GPU machine without a network: its parts, without a network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import gpu_bundle
import gpu_run
import pytest
from halfsafe.benchmarks import gpu, gpu_models, large_models
from setup.environment import SetupError


def make_comfyui(folder: Path) -> Path:
    needed = ("main.py", "comfy/sd.py", "comfy/text_encoders/flux.py", "comfy/text_encoders/spiece_tokenizer.py", "comfy/sd1_tokenizer/vocab.json", "utils/install_util.py")
    left_out = (
        "comfy/text_encoders/t5_tokenizer/tokenizer.json", "tests/test_a.py", "README.md",
        "comfy_api_nodes/nodes_a.py", "models/unet/put_models_here", ".git/HEAD", "comfy/__pycache__/sd.pyc", "input/example.png",
    )  # fmt: skip
    for name in (*needed, *left_out):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("", encoding="utf-8")
    (folder / "comfyui_version.py").write_text('__version__ = "0.30.0"\n', encoding="utf-8")
    (folder / "requirements.txt").write_text("torch\ncomfy-kitchen==0.2.26\ncomfy-aimdo==0.4.11\ntorchsde\n", encoding="utf-8")
    return folder


def make_wheel(folder: Path, name: str, *files: str) -> Path:
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in files:
            archive.writestr(file, "found = True\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")))
    return wheel


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    return make_comfyui(tmp_path / "ComfyUI")


@pytest.fixture
def bundle(tmp_path: Path, comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose one wheel came from no index."""
    monkeypatch.setattr(gpu_bundle, "download", lambda folder, requirements, python: make_wheel(folder, "carried", "carried/__init__.py"))
    gpu_bundle.build(tmp_path / "bundle", comfyui, "3.12")
    return tmp_path / "bundle"


def test_comfyui_travels_without_tokenizers_tests_and_api_nodes(tmp_path: Path, comfyui: Path) -> None:
    gpu_bundle.pack(comfyui, tmp_path / "comfyui.tar.xz")
    with tarfile.open(tmp_path / "comfyui.tar.xz") as tar:
        files = {member.name for member in tar if member.isfile()}
    assert files == {
        "main.py", "comfy/sd.py", "comfy/text_encoders/flux.py", "comfy/text_encoders/spiece_tokenizer.py", "utils/install_util.py",
        "comfy/sd1_tokenizer/vocab.json", "comfyui_version.py", "requirements.txt",
    }  # fmt: skip


def test_a_wheel_loses_files_and_can_still_be_installed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "two", "two/__init__.py", "two/heavy/_C.so")
    gpu_bundle.slim(wheel, ("two/heavy/_C",))
    with zipfile.ZipFile(wheel) as archive:
        assert "two/heavy/_C.so" not in archive.namelist() and "two/__init__.py" in archive.namelist()
        assert b"heavy" not in archive.read("two-1.0.dist-info/RECORD")
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_LZMA}
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)]
    assert subprocess.run(pip, capture_output=True, check=False).returncode == 0
    assert (tmp_path / "site" / "two" / "__init__.py").exists()


def test_versions_are_those_comfyui_asks_for(comfyui: Path) -> None:
    found = gpu_bundle.pinned(("comfy-kitchen", "torchsde", "trampoline"), comfyui / "requirements.txt")
    assert found == ["comfy-kitchen==0.2.26", "torchsde", "trampoline"]


def test_a_bundle_replaces_its_predecessor_and_nothing_else(tmp_path: Path, bundle: Path, comfyui: Path) -> None:
    (bundle / "left over").touch()
    gpu_bundle.build(bundle, comfyui, "3.12")
    assert sorted(path.name for path in bundle.iterdir()) == ["bundle.json", "comfyui.tar.xz", "stubs", "wheels"]
    assert json.loads((bundle / "bundle.json").read_text())["wheels"] == ["carried-1.0-py3-none-any.whl"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(SetupError, match="no bundle"):
        gpu_bundle.build(tmp_path / "mine", comfyui, "3.12")


def test_a_bundle_that_is_too_large_is_refused(bundle: Path, comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "LIMIT", gpu_bundle.checkout_bytes() + 100)
    with pytest.raises(SetupError, match="and the checkout have .* more than"):
        gpu_bundle.build(bundle, comfyui, "3.12")


def test_a_folder_that_is_no_bundle_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is no bundle"):
        gpu_run.run("tests", tmp_path, tmp_path / "out", True)


def imported(name: str, environ: dict[str, str]) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], env=environ, capture_output=True, check=False).returncode == 0


def test_a_dry_run_has_what_travels_and_lacks_what_the_machine_lacks(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "lacking", lambda: {"hypothesis", "carried", "av"})
    dry = gpu_bundle.prepared(bundle, tmp_path / "dry", True)
    assert imported("carried", dry) and imported("av.video.reformatter", dry) and imported("torch", dry)
    assert not imported("hypothesis", dry)
    assert (dry["HALFSAFE_DRY_RUN"], Path(dry["COMFYUI_DIR"]).joinpath("main.py").exists()) == ("1", True)
    real = gpu_bundle.prepared(bundle, tmp_path / "real", False)
    assert imported("hypothesis", real) and "HALFSAFE_DRY_RUN" not in real


def test_the_machine_has_what_its_packages_need_and_nothing_else() -> None:
    needed = gpu_bundle.needed_by(["safetensors", "torch", "Not_Installed"])
    assert {"safetensors", "torch", "sympy", "not-installed"} <= needed and "pytest" not in needed
    lacking = gpu_bundle.lacking(["torch", "numpy", "pytest"])
    assert "hypothesis" in lacking and not lacking & {"torch", "sympy", "numpy", "pytest", "_pytest"}


def test_the_outcome_names_what_failed_and_what_never_ended() -> None:
    lines = [{"test": name, "outcome": outcome} for name in "abcd" for outcome in ("begun", {"a": "passed", "b": "failed", "c": "skipped"}.get(name, "begun"))]
    found = gpu_run.outcome(lines, 1)
    assert found == {"exit_code": 1, "passed": 1, "skipped": 1, "failed": ["b"], "never_ended": ["d"]}


def test_the_table_has_a_line_for_each_test() -> None:
    lines = [{"test": "tests/gpu/test_a.py::test_it_is_right[fp8]", "outcome": "begun"}, {"test": "tests/gpu/test_b.py::test_left", "outcome": "skipped", "seconds": 0.1, "why": "Skipped: no such device"}]
    assert gpu_run.table(lines).splitlines()[2:] == ["| a | it is right[fp8] | begun |  |  |", "| b | left | skipped | 0.1 | no such device |"]


@pytest.mark.parametrize(
    ("found", "bad"),
    [({"passed": 2}, False), ({"skipped": 2}, True), ({"passed": 1, "never_ended": ["d"]}, True), ({"passed": 1, "exit_code": None}, True), ({"passed": 1, "failed": ["b"]}, True)],
)
def test_a_file_of_which_nothing_ran_is_a_failure(found: dict, bad: bool) -> None:
    empty = {"exit_code": 0, "passed": 0, "skipped": 0, "failed": [], "never_ended": []}
    assert gpu_run.is_bad(empty | found) == bad
    assert not gpu_run.is_bad(empty | {"skipped": 2}, may_be_skipped=True)


def test_what_takes_longest_comes_last() -> None:
    names = ["test_compile.py", "test_settings.py", "test_dynamic_vram.py", "test_encoders.py"]
    assert [path.stem for path in gpu_run.ordered(map(Path, names))] == ["test_encoders", "test_settings", "test_dynamic_vram", "test_compile"]


def test_lines_cut_off_by_a_kill_are_left_out(tmp_path: Path) -> None:
    lines = tmp_path / "tests.jsonl"
    lines.write_text('{"test": "a", "outcome": "passed"}\n{"test": "b", "out', encoding="utf-8")
    assert gpu_run.read(lines) == [{"test": "a", "outcome": "passed"}]


def test_a_command_out_of_time_leaves_its_log_and_no_child(tmp_path: Path) -> None:
    log = tmp_path / "slow.log"
    child = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid); time.sleep(60)"
    assert gpu_run.logged([sys.executable, "-uc", child], {}, log, 3) is None
    pid = log.read_text(encoding="utf-8").strip()
    status = Path(f"/proc/{pid}/stat")
    ends = time.monotonic() + 10  # a kill takes effect when the child is next scheduled
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < ends:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_what_a_terminated_run_started_ends_with_it(tmp_path: Path, bundle: Path) -> None:
    log = tmp_path / "out" / "measure.log"
    code = (
        "import sys, gpu_run; gpu_run.prepared = lambda *given: {'COMFYUI_DIR': ''};"
        "gpu_run.measure = lambda environ, out, dry, ends: gpu_run.logged([sys.executable, '-uc', 'import os, time; print(os.getpid()); time.sleep(60)'], {}, out / 'measure.log', 60);"
        "sys.exit(gpu_run.main())"
    )
    command = [sys.executable, "-c", code, "measure", str(bundle), "--out", str(tmp_path / "out")]
    run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(gpu_run.ROOT / "scripts")}, stdout=subprocess.DEVNULL)
    ends = time.monotonic() + 60
    while not (log.exists() and log.read_text(encoding="utf-8").strip()) and time.monotonic() < ends:
        time.sleep(0.1)
    run.terminate()
    assert run.wait(30) == 128 + signal.SIGTERM
    status = Path(f"/proc/{log.read_text(encoding='utf-8').strip()}/stat")
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < ends:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().split()[2] == "Z"


TESTS = """
import time

import pytest

def test_good():
    pass

def test_left():
    pytest.skip("no such device")

def test_hangs():
    time.sleep(60)

def test_after():
    pass
"""


def test_a_test_that_hangs_ends_its_process_and_is_named(tmp_path: Path) -> None:
    """With the hooks of tests/gpu/conftest.py, and without a ComfyUI."""
    hooks = (gpu_run.ROOT / "tests" / "gpu" / "conftest.py").read_text(encoding="utf-8")
    start, end = hooks.index("LINES = "), hooks.index("def pytest_collection_modifyitems")
    (tmp_path / "conftest.py").write_text("import faulthandler, json, os\nimport pytest\n" + hooks[start:end], encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    lines = tmp_path / "lines.jsonl"
    environ = {**os.environ, "HALFSAFE_TEST_LINES": str(lines), "HALFSAFE_TEST_SECONDS": "3"}
    code = gpu_run.logged([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)], environ, tmp_path / "it.log", 60)
    found = gpu_run.outcome(gpu_run.read(lines), code)
    assert code not in (0, None) and (found["passed"], found["skipped"]) == (1, 1)
    assert [test.split("::")[1] for test in found["never_ended"]] == ["test_hangs"]
    assert "test_hangs" in (tmp_path / "lines.jsonl.hung").read_text(encoding="utf-8"), "where it hung"


def test_targets_are_told_for_the_rows_that_are_there() -> None:
    rows = {"fp16": {"seconds": 1.0}, "fp16_safe": {"seconds_to_fp16": 2.0, "device_seconds_to_fp16": 1.2}}
    assert gpu._targets(rows)["fp16_safe_to_fp16"] == {"limit": 1.25, "measured": 1.2, "met": True}
    rows |= {"fp16, guarded": {"seconds_to_fp16": 1.05}, "fp32": {"seconds_to_fp16": 4.8}}
    targets = gpu._targets(rows)
    assert targets["guard"] == {"limit": 1.02, "measured": 1.05, "met": False}
    assert targets["fp32_to_fp16_safe"] == {"limit": 3.0, "measured": 4.0, "met": True}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_gemm_f16f32_f16f32_f32_tn_n_tilesize128x128x64", "product"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "product"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816fprop_optimized>", "product"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "other"),
        ("Memcpy DtoH (Device -> Pageable)", "memcpy"),
    ],
)
def test_a_kernel_is_of_the_cost_models_kind(kernel: str, kind: str) -> None:
    assert gpu_models.kind_of_kernel(kernel) == kind


def test_each_row_goes_to_its_list() -> None:
    rows = {"rows": {"name": "fp16"}, "layers": {"name": "a", "shape": ()}, "models": {"model": "SDXL"}, "loads": {"load": "int8"}}
    assert {name: gpu._list_of(row) for name, row in rows.items()} == {name: name for name in rows}


def test_measuring_ends_in_the_middle_of_a_row_when_its_time_is_up() -> None:
    before, measured = signal.getsignal(signal.SIGALRM), []
    with pytest.raises(gpu.OutOfTime), gpu.ending_after(0.2):
        time.sleep(60)
        measured.append("the row")
    assert not measured and signal.getsignal(signal.SIGALRM) is before
    with gpu.ending_after(float("inf")), gpu.ending_after(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert gpu._named({"model": "Flux", "run": "compiled", "fp16": {}}) == "Flux, compiled"


def test_a_whole_model_is_the_one_that_the_cost_model_counts() -> None:
    assert large_models.ON_A_GPU["SDXL"] is large_models.BUILD["SDXL"], "else the profile has nothing beside it"
    assert large_models.ON_A_GPU.keys() == large_models.SMALL.keys() == {*gpu_models.WHOLE, *dict(gpu_models.IN_ORDER)}
