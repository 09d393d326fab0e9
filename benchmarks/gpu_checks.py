"""What benchmarks/gpu.py asks a GPU without timing it: rules, tests, clones."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .gpu_rows import TAIL, ended

STORAGES = ("as_file", "fp16", "bf16", "fp32", "fp8_e4m3fn", "int8")
COMPUTES = ("auto", "fp16", "bf16", "fp32", "fp16_safe", "fp8")
COMPILED = (("as_file", "auto"), ("as_file", "fp16_safe"), ("int8", "auto"))
RIGHT = 0.2
"""Relative error of four steps of a toy, which no setting reaches that computes what it says."""
TEST_SECONDS = 40


def rules() -> dict:
    """Run a case of each rule of tests/support/cuda_rules.py; which of them the device answers otherwise. On a CPU under the rule book."""
    import contextlib

    import torch
    from support import rule_cases
    from support.cuda_rules import CudaRules

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.nullcontext() if device.type == "cuda" else CudaRules():
        otherwise = rule_cases.answered_otherwise(device)
    if device.type == "cpu":
        otherwise.pop("two devices", None)
    asked = len(rule_cases.REFUSED) + len(rule_cases.TAKEN) + len(rule_cases.READS)
    return {
        "said": f"{len(otherwise)} of {asked} rules answered otherwise: {', '.join(otherwise) or 'none'}",
        "otherwise": otherwise,
    }


def static_clones(comfy) -> dict:
    """Run a static clone of a small model loaded under dynamic VRAM in each storage and compute; errors against ComfyUI's fp32."""
    return _judged(comfy, [(storage, compute) for storage in STORAGES for compute in COMPUTES], _static)


def compiled_clones(comfy, dry: bool) -> dict:
    """Run such clones as TorchCompileModel makes them."""
    from support.compiling import COMPILER, compiled

    def compile_whole(model):
        return compiled(model, backend=COMPILER if dry else "inductor")

    return _judged(comfy, COMPILED, compile_whole)


def _static(model):
    clone = model.clone(disable_dynamic=True)
    assert not clone.is_dynamic()
    return clone


def _judged(comfy, settings: Sequence[tuple[str, str]], made: Callable) -> dict:
    """Sample a small model in each storage and compute with what ``made`` makes of it, against ComfyUI's own in fp32."""
    from support import families, tiny_models
    from support.measures import relative_error

    path = tiny_models.wan(comfy.folder / "static_clone.safetensors")
    reference = families.sample(families.stock(path), "wan").float().cpu()

    def error_in(storage: str, compute: str) -> float | str:
        try:
            clone = made(families.load(comfy, path, storage, compute))
            return float(f"{relative_error(reference, families.sample(clone, 'wan').float().cpu()):.1e}")
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    found = {f"{storage}, {compute}": error_in(storage, compute) for storage, compute in settings}
    wrong = [name for name, error in found.items() if not isinstance(error, float) or not error < RIGHT]
    worst = max((error for error in found.values() if isinstance(error, float)), default=float("nan"))
    row = {"said": f"{len(found) - len(wrong)} of {len(found)} right, largest error {worst}", "errors": found}
    return row | {"problem": f"{wrong[0]}: {found[wrong[0]]}"} if wrong else row


def run_tests(args: argparse.Namespace, ends: float) -> dict:
    """Run tests/gpu; outcome of each test. A test that hangs ends pytest, which begins again after it."""
    lines = (args.out or Path(tempfile.gettempdir()) / "gpu.json").absolute().with_suffix(".tests.jsonl")
    lines.write_text("", encoding="utf-8")
    more = {
        "COMFYUI_DIR": str(args.comfyui.resolve()),
        "HALFSAFE_TEST_LINES": str(lines),
        "HALFSAFE_TEST_SECONDS": str(TEST_SECONDS * (8 if args.dry_run else 1)),
    }
    environ = (
        os.environ
        | more
        | ({"HALFSAFE_DRY_RUN": "1"} if args.dry_run else {})
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    )
    last: dict[str, dict] = {}
    while True:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/gpu",
            *(f"--deselect={test}" for test in last),
        ]
        code, printed = ended(command, max(1, ends - time.monotonic()), environ)
        found = {line["test"]: line for line in map(json.loads, lines.read_text(encoding="utf-8").splitlines())}
        hung = {test for test, line in found.items() if line["outcome"] == "begun"} - {*last}
        last = found
        if not hung or code is None:
            break
    bad = {
        test.split("::")[-1]: line.get("why", "hung")[-300:]
        for test, line in last.items()
        if line["outcome"] in ("failed", "begun")
    }
    passed, skipped = (sum(line["outcome"] == outcome for line in last.values()) for outcome in ("passed", "skipped"))
    row = {
        "said": f"{passed} passed, {skipped} skipped, {len(bad)} failed",
        "passed": passed,
        "skipped": skipped,
        "failed": bad,
    }
    if code is None:
        return row | {"problem": "the time was up"}
    return row if passed and not bad else row | {"problem": ", ".join(bad) or printed[-TAIL:]}
