"""Two threads on one model: each picture is right and nothing stays on its layers, whatever a call puts there; threads on two models run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable

import comfy.model_management
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.guard import encoders
from halfsafe.precision.plan.rules import rules_from
from support import control_files, families, model_files
from support.guarding import core, guarded, left_on, plain_fp16
from support.measures import relative_error
from support.summing import accumulation, states

pytestmark = pytest.mark.not_as_on_cuda(
    "two threads put the rules on torch at once, and what the first takes off the second puts back"
)

LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.1.ffn.2": (256, 1024)}
MEET = 0.4
"""Seconds for which the first thread waits in a call for the second."""
KINDS = {
    "compute": lambda comfy, wan, overflowing: families.load(comfy, wan, "as_file", "fp16_safe"),
    "rules": lambda comfy, wan, overflowing: families.load(
        comfy, wan, "as_file", "bf16", rules_from("*.ffn.* compute=fp16_safe stream=fp32\nblocks.0 attention=fp32")
    ),
    "int8": lambda comfy, wan, overflowing: families.load(comfy, wan, "int8", "fp16_safe"),
    "rungs of the guard": lambda comfy, wan, overflowing: guarded(comfy, plain_fp16(comfy, overflowing)),
    "accumulation": lambda comfy, wan, overflowing: accumulation(
        comfy, families.load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto", attention="auto"
    ),
    "LoRA": lambda comfy, wan, overflowing: load_lora_for_models(
        families.load(comfy, wan, "int8", "bf16"), None, model_files.lora(LAYERS, size=0.3), 1.0, 0.0
    )[0],
    "check": lambda comfy, wan, overflowing: comfy.run(
        "HalfsafeNaNGuard",
        model=families.load(comfy, wan, "as_file", "bf16"),
        on_nan="retry_higher",
        max_retries=8,
        check="first step",
    )[0],
}


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")


def side_by_side(*works: Callable) -> list:
    """Results of calls in a thread each."""
    results: dict[int, object] = {}

    def run(index: int) -> None:
        try:
            with torch.inference_mode():
                results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[index] for index in range(len(works))]


class Meeting:
    """Two threads wait for each other, the first time that both can be there. ``met``: they were there at once."""

    def __init__(self, seconds: float):
        self._barrier, self._seconds, self.met = threading.Barrier(2), seconds, False

    def __call__(self) -> None:
        if self._barrier.broken or self.met:
            return
        try:
            self._barrier.wait(self._seconds)
            self.met = True
        except threading.BrokenBarrierError:
            pass


def meeting_in_calls(model, meeting: Meeting):
    """A clone of a model, in whose calls a thread waits for another after the patches of a call are on."""
    clone = model.clone()

    def wait(executor, *args, **kwargs):
        meeting()
        return executor(*args, **kwargs)

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "meeting", wait)
    return clone


def sampled(model, seed: int) -> torch.Tensor:
    return families.sample(model, "wan", steps=2, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_of_one_model(comfy, wan, overflowing, kind):
    with torch.inference_mode():
        model = KINDS[kind](comfy, wan, overflowing)
        expected = [sampled(model, seed) for seed in (2, 3)]
    before, flags, meeting = (left_on(model.model), states(), Meeting(MEET))
    waiting = meeting_in_calls(model, meeting)
    results = side_by_side(*(lambda seed=seed: sampled(waiting, seed) for seed in (2, 3)))
    assert not meeting.met and left_on(model.model) == before and states() == flags
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(exact, result) < 1e-3


def test_runs_of_two_models_are_side_by_side(comfy, wan):
    models = [families.load(comfy, wan, "as_file", "fp16_safe") for _ in range(2)]
    with torch.inference_mode():
        expected = [sampled(model, 2) for model in models]
    meeting = Meeting(60.0)
    waiting = [meeting_in_calls(model, meeting) for model in models]
    results = side_by_side(*(lambda model=model: sampled(model, 2) for model in waiting))
    assert meeting.met
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(exact, result) < 1e-3


def test_a_call_in_another_thread_than_its_run_does_not_wait_for_the_run(comfy, wan):
    """ComfyUI's MultiGPU calls each model in a thread of its own, the first one too."""
    model = families.load(comfy, wan, "as_file", "fp16_safe").clone()

    def elsewhere(executor, *args, **kwargs):
        return side_by_side(lambda: executor(*args, **kwargs))[0]

    with torch.inference_mode():
        expected = sampled(model, 2)
        model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "elsewhere", elsewhere)
        assert relative_error(expected, sampled(model, 2)) < 1e-3


def test_two_calls_of_one_control_net(comfy, models_dir):
    path = control_files.sd15(models_dir / "controlnet" / "threads.safetensors")
    control = comfy.run("HalfsafeLoadControlNet", control_net_name=path.name, storage="fp16", compute="fp16_safe")[0]
    module, meeting = control.control_model, Meeting(MEET)
    with torch.inference_mode():
        expected = [control_files.give(control, "sd15", seed) for seed in (3, 4)]
    before = left_on(module)
    handle = next(iter(module.children())).register_forward_pre_hook(lambda *_: meeting())
    results = side_by_side(*(lambda seed=seed: control_files.give(control, "sd15", seed) for seed in (3, 4)))
    handle.remove()
    assert not meeting.met and left_on(module) == before
    assert all(relative_error(exact, result) < 1e-3 for exact, result in zip(expected, results, strict=True))


def test_two_text_encoders_that_generate_in_fp32_leave_comfyui_as_it_was():
    own, step = comfy.model_management.should_use_bf16, encoders.EncoderStep(torch.float32)
    inside, outside = threading.Barrier(2), threading.Barrier(2)

    def first():
        with encoders._generating_in(step):
            inside.wait(10)
        outside.wait(10)

    def second():
        inside.wait(10)
        with encoders._generating_in(step):
            outside.wait(10)

    side_by_side(first, second)
    assert comfy.model_management.should_use_bf16 is own


def test_two_texts_of_one_guarded_encoder_take_turns(comfy, models_dir):
    meeting = Meeting(MEET)
    guard, patcher = (
        encoders.EncoderGuard("Text encoder", "report", None),
        core("comfy.model_patcher").ModelPatcher(torch.nn.Linear(2, 2), torch.device("cpu"), torch.device("cpu")),
    )

    def make(step, given, beside):
        meeting()
        return encoders.Attempt(torch.ones(1), 1.0)

    side_by_side(*(lambda: guard.run("encode", make, patcher, torch.float16, [torch.ones(1)]) for _ in range(2)))
    assert not meeting.met
