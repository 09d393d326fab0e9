"""Seconds of the processor that tests take: what each takes alone, and the limit that it is held to.

Wall time says how busy a machine is. The seconds of this process and of the processes that it started say what a test costs, within a
factor of about two: a core that does other work beside takes longer for the same.

Each test has three numbers in the JUnit file. ``own_seconds``: its call and its own fixtures. ``may_take_seconds``: its limit.
``cpu_seconds``: all that the process took since the test before it, imports, collection and shared fixtures among them, so that their sum
is what the process took.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

LIMIT = 2.0
"""Seconds of an idle core that a test may take."""
ROOM = 3.0
"""A test fails at this multiple of what it may take: no machine that is busy or old needs as much for a test within its limit."""
OF_PAGES = "tests/browser/"
"""Tests that are counted and not held to the limit: a page draws for as long as its test waits, so its seconds say how busy the machine is."""
EXCEPTIONS = {
    "tests/host/compile/test_compile_attention.py::test_compute_and_accumulation_share_the_attention_of_a_compiled_model": 3.5,
    "tests/host/compile/test_compute.py::test_a_later_overflow_is_right_and_compiles_once_more": 4.0,
    "tests/host/compile/test_compute.py::test_one_graph_no_break_and_no_recompilation": 4.0,
    "tests/host/compile/test_fake_cuda.py::test_a_compiled_model_is_one_graph": 4.0,
    "tests/host/compile/test_guard.py::test_a_compiled_clean_model_is_compiled_as_without_the_guard": 3.0,
    "tests/host/compile/test_guard.py::test_a_compiled_model_that_overflows_is_cured": 4.5,
    "tests/host/compile/test_int8.py::test_a_compiled_int8_model_multiplies_as_it_does_uncompiled": 3.0,
    "tests/host/compute/test_auto_fp16.py::test_a_compiled_model_falls_back_too": 5.0,
    "tests/host/cuda/test_fake_cuda.py::test_a_clean_call_reads_once_and_once_for_the_guard": 4.0,
    "tests/host/graph/test_demo.py::test_the_result_is_said_first_and_the_layers_are_in_the_report_file": 9.5,
    "tests/host/graph/test_import.py::test_import_from_a_read_only_folder_imports_writes_and_starts_nothing": 7.5,
    "tests/host/graph/test_server.py::test_a_calibration_is_kept_until_one_of_its_inputs_changes": 4.5,
    "tests/host/graph/test_workflows.py::test_workflow_draws_what_it_is_asked_for": 4.0,
    "tests/host/guard/test_encoders.py::test_of_two_encoders_the_one_that_overflows_is_named_and_widened_alone": 2.5,
    "tests/host/guard/test_failure_classes.py::test_29_a_compiled_graph": 4.0,
    "tests/host/guard/test_failure_through_the_server.py::test_the_report_tells_what_the_guard_of_the_vae_saw_in_its_prompt": 3.0,
    "tests/host/load/test_save.py::test_a_compiled_block_is_saved_under_the_names_of_its_layers": 3.5,
    "tests/host/lora/test_low_rank.py::test_layers_that_run_on_the_text_before_the_models_calls": 3.0,
    "tests/host/lora/test_weights_written.py::test_an_encoder_a_vae_and_a_checkpoint_are_saved": 4.0,
    "tests/unit/arithmetic/test_products_wide.py::test_a_compiled_model_is_one_graph_of_wide_products": 4.0,
    "tests/unit/arithmetic/test_proofs.py::test_a_record_takes_no_kernel_of_its_own_in_a_graph": 4.0,
    "tests/unit/commands/test_cli.py::test_a_pipe_without_a_reader_leaves_the_exit_code_as_it_is": 2.5,
    "tests/unit/commands/test_cli.py::test_an_interrupt_while_it_works_is_one_line_and_130_and_leaves_no_file": 2.7,
    "tests/unit/commands/test_cli.py::test_output_that_cannot_be_written_is_told_and_the_work_is_done": 2.5,
    "tests/unit/commands/test_convert.py::test_memory_stays_below_three_times_the_largest_tensor": 4.0,
    "tests/unit/formats/test_w4a8.py::test_the_same_in_a_process_with_a_newer_comfy_kitchen": 6.0,
    "tests/unit/project/test_ideas.py::test_a_count_of_ideas_only_falls": 3.0,
}
"""Test -> seconds that it may take: graphs are traced several times, a process imports torch or ComfyUI, a server draws. At most thirty, and
only fewer: before one is added, another is made cheaper."""


def seconds() -> float:
    """Seconds that this process took, and the processes that it started; of those that still run where the system tells it (Linux)."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system + _running(os.getpid())


def _running(process: int) -> float:
    total = 0.0
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError, ValueError, IndexError):
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + _running(int(child))
    return total


def allowed(item: pytest.Item) -> float:
    """Seconds of an idle core that a test may take, whatever its parameters; no limit for one that runs before a release alone."""
    if item.nodeid.startswith(OF_PAGES) or item.get_closest_marker("release"):
        return math.inf
    return EXCEPTIONS.get(item.nodeid.partition("[")[0].partition("@")[0], LIMIT)


class CpuTime:
    """A plugin of pytest that counts the seconds of each test, and fails a test that takes far more than it may."""

    def __init__(self) -> None:
        self._before = self._began = 0.0
        self._shared = 0.0
        self._making_shared = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        if fixturedef.scope == "function" or self._making_shared:
            return (yield)
        started, self._making_shared = seconds(), True
        try:
            return (yield)
        finally:
            self._making_shared = False
            self._shared += seconds() - started

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self._began, self._shared = seconds(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        if call.when != "call":
            return (yield)
        now = seconds()
        own = max(now - self._began - self._shared, 0.0)  # a process that ended unseen takes its seconds with it
        numbers = {"own": own, "may_take": allowed(item), "cpu": max(now - self._before, 0.0)}
        item.user_properties += [(f"{name}_seconds", f"{number:.2f}") for name, number in numbers.items()]
        self._before = now
        report = yield
        if report.passed and own > ROOM * allowed(item):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {own:.1f} seconds of the processor, and may take {allowed(item):.1f} on an idle core: "
                "take a smaller model, fewer steps, or a fixture that tests share."
            )
        return report
