"""Run every test on a fresh machine: set up, check the style, then each tier, two of them beside the others. `python scripts/test.py --help`."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setup import chromium
from setup.environment import (
    ROOT,
    Environment,
    SetupError,
    accelerator,
    clean_environ,
    newest_frontend,
    prepare,
    provide_kitchen,
)
from setup.machine import counts_of, cpu_of
from setup.progress import last_line, run_shown, stage
from setup.quick import changed_files, tests_of

TIERS = {
    "unit": "tests/unit",
    "host": "tests/host",
    "next": "tests/host",  # the same tests under the layer call of the ComfyUI after 0.39
    "compile": "tests/host/compile",  # counts graphs: in a process that has compiled nothing else
    "browser": "tests/browser",
    "gpu": "tests/gpu",
}
BESIDE = ("browser", "compile", "next")
"""What runs beside the other tiers, one after the other: a page waits half of the time, and the compiler's tests and those of the next core fill what is left in one
process, which imports ComfyUI once."""
# How a tier's tests are shared out between two processes: each begins with a half, and the one that ends first takes tests from
# the end of the other's. A page's tests share its server.
STEALING = ("--dist", "worksteal")
NEXT_CORE = {
    "compute/test_bound.py": (
        "a_clean_call_makes_the_planned_product_without_the_tensor_subclass",
        "a_layers_own_scale_of_its_input_is_applied",
        "every_rank_of_input_with_and_without_a_bias",
        "what_is_not_resolved_runs_comfyuis_own_forward",
        "further_arguments_and_gradients_run_comfyuis_own_forward",
        "under_dynamic_vram_a_weight_is_lent_once_and_given_back",
    ),
    "compute/test_compute.py": (
        "fp16_safe_is_finite_and_closer_than_bf16",
        "an_overflow_of_a_later_call_in_one_row_repeats_that_call_once",
        "through_the_sampler_twice_in_one_prompt",
    ),
    "compute/test_compute_fp8.py": (
        "every_rank_of_input_and_an_fp32_stream",
        "the_model_multiplies_in_fp8_where_weights_are_and_16_bit_elsewhere",
        "of_a_file_in_two_storages_the_layers_in_fp8_multiply_in_fp8",
        "a_rule_multiplies_in_fp8_whatever_dtype_the_weight_stands_for",
        "a_lora_in_bypass_mode_is_multiplied_in_16_bit",
    ),
    "compute/test_int8.py": (
        "a_dtype_that_is_asked_for_is_what_int8_weights_multiply_in",
        "where_nothing_is_asked_for_the_product_stays_int8",
        "rules_of_each_layer",
        "the_guard_repeats_without_int8_and_reports_it",
    ),
    "compute/test_int8_compute.py": (
        "the_report_is_what_the_products_are",
        "the_stream_is_fp32_where_the_model_is_not_safe_in_16_bit",
        "rules",
        "a_lora_runs_as_the_report_says",
        "a_lora_in_bypass_mode",
        "layers_that_comfyui_multiplies_past_their_forward",
    ),
    "guard/test_guard.py": (
        "an_overflowing_model_comes_out_right",
        "a_rung_computes_in_its_own_dtypes_under_a_callers_autocast",
        "escalations_are_rules_that_need_no_guard",
        "fp8_weights_that_overflow_fp16",
        "a_broken_attention_is_left_out_of_later_calls",
        "what_a_patch_brings_in_fp16_runs_in_a_repeat_in_fp32",
        "what_a_patch_brings_in_fp16_is_compared_by_the_check",
    ),
    "guard/test_int8.py": (
        "an_overflow_is_dequantized_and_the_other_layers_stay_in_int8",
        "what_is_escalated_in_int8_is_dequantized",
        "four_bit_weights_are_dequantized_when_they_are_escalated",
    ),
    "accumulation/test_accumulation_layers.py": (
        "layers_sum_in_fp16_but_those_that_overflow",
        "the_result_is_that_of_the_plain_model",
        "a_lora_is_part_of_the_weight_that_is_tried",
        "a_louder_step_is_repeated_and_the_layer_that_overflowed_stays_in_fp32",
        "a_rule_that_makes_a_layer_fp16_has_fp16_sums",
    ),
    "accumulation/test_accumulation_fp8.py": (
        "the_bits_are_those_of_comfyuis_dispatch",
        "the_same_under_dynamic_vram",
        "fp8_fast_accumulation_holds_for_one_model",
    ),
    "lora/test_encoders_saving_merging.py": (
        "a_text_encoder",
        "a_text_encoder_with_a_lora_of_comfyuis_bypass_node",
        "a_lora_of_comfyuis_bypass_node_beside_ours",
        "a_lora_of_a_hook_acts_on_a_layer_of_an_encoder_that_stays_in_16_bit",
        "a_merge_is_that_of_the_models",
    ),
    "load/test_loaders.py": (
        "every_storage_gives_the_picture",
        "full_checkpoint_makes_the_picture",
        "text_encoder_gives_the_conditioning",
    ),
    "study/test_calibrate.py": (
        "the_sums_are_those_of_the_inputs",
        "a_quantized_model_is_calibrated_on_what_its_layers_meet",
        "a_lora_is_in_what_the_layers_meet",
    ),
}
"""Host tests that run under the next ComfyUI's layer call too, each value of their parameters once: one of each setting. Before a release
these files run whole. The tests of the gate put that call on by themselves, in the host tier."""
IN_TWO_PROCESSES = {
    "unit": STEALING,
    "host": STEALING,
    "browser": ("--dist", "loadgroup", "--no-loadscope-reorder"),
}
CPU_MINUTES = 24
"""What all tests may take of an idle processor; `tests/support/cpu_time.py` holds each test to its part."""
SLOWEST = 5
"""How many tests of a tier are named with the seconds that they took, where none took more than it may."""
ONE_THREAD_EACH = ("unit", "host", "next", "compile")


@dataclass(frozen=True)
class Result:
    """What one stage of the run came to; ``passed`` is None where it could not run."""

    name: str
    passed: bool | None
    summary: str
    seconds: float
    cpu_seconds: float = 0.0


def main() -> int:
    options, pytest_args = _parse(sys.argv[1:])
    try:
        environment = prepare(options.comfyui)
        provide_kitchen(environment.python)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    if options.quick:
        return _quick(environment, pytest_args)
    if options.release:
        os.environ["HALFSAFE_RELEASE"] = "1"  # the tests' processes have it from here
    tiers = _tiers(options.tier, environment)
    with _beside(environment, tiers, pytest_args) as beside:
        results = _check_style(environment) if options.tier is None else []
        for tier in tiers:
            results.append(
                beside.wait_and_show(tier)
                if tier in beside.logs
                else _run_tier(tier, environment, pytest_args, beside=beside.last_line)
            )
    code = _report(results, required=options.tier)
    if options.tier is None and not options.release:
        minutes = sum(result.cpu_seconds for result in results) / 60
        print(
            f"The tests took {minutes:.1f} minutes of the processor; {CPU_MINUTES} is what they may take on idle cores."
        )
    return code


def _quick(environment: Environment, pytest_args: list[str]) -> int:
    """Run the tests of what changed, and say what this leaves out."""
    try:
        chosen = tests_of(changed_files())
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    results = _check_style(environment, ("ruff", "format"))
    for tier in ("unit", "host"):
        if paths := [path for path in chosen if path.startswith(TIERS[tier])]:
            results.append(_run_tier(tier, environment, pytest_args, paths=paths))
    code = _report(results)
    print(
        f"These were the tests of {', '.join(chosen)}. This is NOT all: run scripts/test.py before a change is merged."
    )
    return code


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=TIERS, help="run this tier only")
    parser.add_argument(
        "--quick", action="store_true", help="two minutes: the tests of the rooms that changed since main; not all"
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help="all that is run before a release, too: marker `release`, each page, each case",
    )
    parser.add_argument("--comfyui", type=Path, help="a ComfyUI folder to test with, instead of the pinned one")
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


def _tiers(wanted: str | None, environment: Environment) -> list[str]:
    if wanted:
        return [wanted]
    has_gpu_tests = (ROOT / TIERS["gpu"]).is_dir()
    return ["unit", "host", "next", "compile", "browser"] + (
        ["gpu"] if has_gpu_tests and accelerator(environment.python) == "cuda" else []
    )


@dataclass
class Beside:
    """The tiers that run beside the others, in their order; what each prints is kept in its log until it is waited for."""

    logs: dict[str, Path]
    running: dict[str, Future[Result]]

    def last_line(self) -> str:
        """How far the one that runs now has come."""
        now = next((tier for tier, future in self.running.items() if not future.done()), None)
        return f", {now}: {last_line(self.logs[now])}" if now else ""

    def wait_and_show(self, tier: str) -> Result:
        with stage(f"\n== {tier}, which began beside the others", lambda: last_line(self.logs[tier])):
            result = self.running[tier].result()
        print(self.logs[tier].read_text(encoding="utf-8", errors="replace"), flush=True)
        return result


@contextlib.contextmanager
def _beside(environment: Environment, tiers: list[str], pytest_args: list[str]) -> Iterator[Beside]:
    """Run some tiers while the others run, where there are others."""
    chosen = [tier for tier in BESIDE if tier in tiers] if tiers[1:] else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(1) as thread:
        logs = {tier: Path(folder) / f"{tier}.log" for tier in chosen}
        for log in logs.values():
            log.touch()
        yield Beside(
            logs,
            {tier: thread.submit(_fetch_and_run, tier, environment, pytest_args, log) for tier, log in logs.items()},
        )


def _fetch_and_run(tier: str, environment: Environment, pytest_args: list[str], log: Path) -> Result:
    """Fetch the browser and the newest page without a word if the tier needs them, and run it. It fetches what this could not, and tells why."""
    if tier == "browser":
        command = [sys.executable, "-m", chromium.__name__, str(environment.python)]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, cwd=ROOT / "scripts", env=clean_environ(), **quiet)
    return _run_tier(tier, environment, pytest_args, log)


def _check_style(environment: Environment, names: Sequence[str] = ("ruff", "format", "types")) -> list[Result]:
    commands = {
        "ruff": ["-m", "ruff", "check", "."],
        "format": ["-m", "ruff", "format", "--check", "--quiet", "."],
        "types": ["scripts/typecheck.py"],
    }
    return [_check(name, [str(environment.python), *commands[name]]) for name in names]


def _check(name: str, command: list[str]) -> Result:
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    code = run_shown(command, ROOT, clean_environ(PYTHONUNBUFFERED="1"))
    return Result(name, code == 0, "clean" if code == 0 else "failed", time.monotonic() - started)


def _run_tier(
    tier: str,
    environment: Environment,
    pytest_args: list[str],
    log: Path | None = None,
    beside: Callable[[], str] = str,
    paths: Sequence[str] = (),
) -> Result:
    """Run a tier, or these tests of it, and show its output, or keep it in ``log``; ``beside`` says how far another one is."""
    if log is None:
        print(f"\n== {tier}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # pytest keeps gigabytes of three runs
        junit = Path(folder) / "junit.xml"
        command = [
            str(environment.python),
            "-m",
            "pytest",
            *(paths or _paths(tier)),
            f"--junitxml={junit}",
            *_color(),
            *_workers(tier),
        ]
        try:
            environ = _tier_environ(tier, environment)
        except SetupError as error:
            return Result(tier, None, str(error), time.monotonic() - started)
        command, environ = [*command, *pytest_args], environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
        code = run_shown(command, ROOT, environ, beside) if log is None else _run_logged(command, environ, log)
        taken, tests = cpu_of(junit)
        _tell_slow(tests, log)
        return Result(tier, code == 0, counts_of(junit), time.monotonic() - started, taken)


def _tell_slow(tests: list[dict], log: Path | None) -> None:
    """Print the tests that took most of the processor, and all that took more than they may, behind what their tier printed."""
    shown = [
        test for place, test in enumerate(tests) if place < SLOWEST or test["own_seconds"] > test["may_take_seconds"]
    ]
    lines = "".join(
        f"{test['own_seconds']:7.1f} s of the processor, of {test['may_take_seconds']:.1f}: {test['name']}\n"
        for test in shown
    )
    if log is None:
        print(lines, flush=True)
        return
    with log.open("a", encoding="utf-8") as output:
        output.write(lines)


def _run_logged(command: list[str], environ: dict[str, str], log: Path) -> int:
    with log.open("wb") as output:
        return subprocess.run(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode


def _paths(tier: str) -> list[str]:
    if tier != "next":
        return [TIERS[tier]]
    files = {f"{TIERS[tier]}/{path}": names for path, names in NEXT_CORE.items()}
    if os.environ.get("HALFSAFE_RELEASE"):
        return [*files]
    return [f"{path}::test_{name}" for path, names in files.items() for name in names]


def _color() -> list[str]:
    return ["--color=yes"] if sys.stdout.isatty() else []


def _workers(tier: str) -> list[str]:
    """Small models gain more from two processes of one thread each than from one of two."""
    without = [f"--ignore={TIERS['compile']}"] if tier == "host" else []
    return [*without, *(["-n", "2", *IN_TWO_PROCESSES[tier]] if tier in IN_TWO_PROCESSES else [])]


def _tier_environ(tier: str, environment: Environment) -> dict[str, str]:
    more = {"OMP_NUM_THREADS": "1"} if tier in ONE_THREAD_EACH else {}
    if tier == "next":
        more["HALFSAFE_NEXT_CORE"] = "1"
    if tier == "browser":
        more = {
            "CHROMIUM": str(chromium.provide_chromium(environment.python)),
            "HALFSAFE_FRONTEND": str(newest_frontend(environment.python)),
        }
    return clean_environ(PYTHONUNBUFFERED="1", HALFSAFE_STRICT="1", COMFYUI_DIR=str(environment.comfyui), **more)


def _report(results: list[Result], required: str | None = None) -> int:
    """Print the summary and return the exit code: 1 where a stage failed, or where the tier asked for by name could not run."""
    print("\n== summary")
    for result in results:
        word = {True: "ok", False: "FAILED", None: "NOT RUN"}[result.passed]
        summary = result.summary if result.passed is not None else "see below"
        cpu = f", {result.cpu_seconds:.0f} s of the processor" if result.cpu_seconds else ""
        print(f"{result.name:7} {word:7} {summary} in {result.seconds:.1f} s{cpu}")
    for result in results:
        if result.passed is None:
            print(f"\n!!! The {result.name} tests did NOT run.\n{result.summary}")
    return 0 if all(r.passed or (r.passed is None and r.name != required) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
