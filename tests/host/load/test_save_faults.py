"""Faults while a model runs or is saved: whatever fails wherever, all is afterwards as it was, and the next run is right."""

import os
import signal
import sys
from collections.abc import Callable

import pytest
import torch
from support import families, faults
from support.families import load, with_compute
from support.measures import relative_error
from support.summing import accumulation, states
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLED = 12
ALLOCATING = (
    "empty",
    "mm",
    "add",
    "mul",
    "copy",
    "convolution",
    "softmax",
    "attention",
    "cat",
    "norm",
    "clone",
    "gelu",
    "zeros",
    "stack",
)


class FaultMode(TorchDispatchMode):
    """Raises at the n-th operation that allocates; counts them where n is None."""

    def __init__(self, n: int | None, error: BaseException):
        super().__init__()
        self.n, self.error, self.count = n, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in func.__name__ for word in ALLOCATING):
            self.count += 1
            if self.count - 1 == self.n:
                raise self.error
        return func(*args, **(kwargs or {}))


WATCHED = ("forward", "comfy_cast_weights", "_full_precision_mm", "weight_function", "bias_function")


def state_of(model) -> dict:
    """What a patch could leave on a module, and torch's process-wide settings."""
    modules = {
        (name, key): list(value) if isinstance(value := module.__dict__[key], list) else value
        for name, module in model.model.named_modules()
        for key in WATCHED
        if key in module.__dict__
    }
    return {"modules": modules, "flags": states(), "dtype": torch.get_default_dtype(), "grad": torch.is_grad_enabled()}


def fp16_safe(comfy, wan, overflowing):
    return with_compute(comfy, load(comfy, overflowing, "fp16"), "fp16_safe")


def summed(comfy, wan, overflowing):
    settings = {"fp16_accumulation": "auto", "reduced_precision_reduction": "off", "tf32": "off", "attention": "auto"}
    return accumulation(comfy, load(comfy, wan, "fp16", "fp16"), **settings)


def both(comfy, wan, overflowing):
    return accumulation(comfy, fp16_safe(comfy, wan, overflowing), tf32="on", attention="fp32")


def fp8(comfy, wan, overflowing):
    return with_compute(comfy, load(comfy, wan, "fp8_e4m3fn", "bf16"), "fp16_safe")


MODELS = {"fp16_safe": fp16_safe, "accumulation": summed, "both": both, "fp8 weights": fp8}
ERRORS = {"out of memory": torch.OutOfMemoryError("injected"), "interrupt": KeyboardInterrupt()}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_fault_at_any_allocation_of_a_later_call_leaves_no_trace(comfy, wan, overflowing, call, ampere, kind, error):
    model = MODELS[kind](comfy, wan, overflowing)
    right, total = families.replay(model, call), allocations(model, call)
    before, sampled = state_of(model), range(0, total, total // SAMPLED)
    raised = sum(fault_at(n, ERRORS[error], model, call, right, before) for n in sampled)
    assert raised >= 0.8 * len(sampled)  # ComfyUI's own attention tries again with less memory


def allocations(model, call) -> int:
    """How often a call of the model allocates."""
    with FaultMode(None, None) as counter:
        families.replay(model, call)
    assert counter.count > SAMPLED
    return counter.count


def fault_at(n: int, error: BaseException, model, call, right: torch.Tensor, before: dict) -> bool:
    """Whether the n-th allocation's failure came through; either way all is as before, and the next call is right."""
    try:
        with FaultMode(n, error):
            result = families.replay(model, call)
    except type(error):
        result = None
    assert state_of(model) == before, f"allocation {n}"
    assert result is None or relative_error(right, result) < 1e-3, f"allocation {n}"
    assert torch.equal(families.replay(model, call), right), f"allocation {n}"
    return result is None


def killed_at(point: int, run: Callable[[], object]) -> None:
    """End this process the hard way before the given point."""
    passed = []

    def step():
        passed.append(None)
        if len(passed) == point + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with faults.watched(step):
        run()


def in_a_fork(run: Callable[[], object]) -> int:
    """Run in a copy of this process; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills as Linux does")
def test_a_kill_at_any_point_of_saving_a_model_leaves_no_half_file(comfy, wan):
    from pathlib import Path

    import folder_paths
    from halfsafe.nodes.host.load.save import save_model
    from halfsafe.precision.plan.rules import rules_from

    model = load(comfy, wan, "fp8_e4m3fn", "bf16")
    output = Path(folder_paths.get_output_directory())

    def save(prefix):
        return save_model(model, f"faults/{prefix}", "as_file", rules_from(), None, None).name

    whole = (output / save("whole")).read_bytes()
    points = faults.count(lambda: save("counted"))
    for point in (0, 1, points // 2, points - 2, points - 1):
        before = {path.name for path in (output / "faults").iterdir()}
        assert in_a_fork(lambda point=point: killed_at(point, lambda: save("killed"))) == -signal.SIGKILL
        new = {path.name for path in (output / "faults").glob("*.safetensors")} - before
        assert all((output / "faults" / name).read_bytes() == whole for name in new), f"point {point}"
