"""ComfyUI's model compiler around calls of ours: none begins a graph in an open one, keeps what a block allocated, or allocates otherwise."""

import threading

import comfy.cli_args
import pytest
import torch
from comfy.ldm.minimax.model import MiniMaxH3Model
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.guard.clamps import ClampWatch
from halfsafe.nodes.host.guard.model import guard_of
from halfsafe.nodes.host.replay.model_compiler import compiler_off
from halfsafe.nodes.host.study.analysis import analyze_model
from halfsafe.nodes.host.study.calibrate import calibrate_model
from halfsafe.nodes.host.study.tradeoffs import Inputs, measure_model
from halfsafe.precision.guard.policy import Escalation
from halfsafe.precision.study.settings import settings_from
from support import families, model_files, qwen_image21, rare_families
from support.comfy_compiler import GraphError, comfy_compiler
from support.guarding import guarded, inside, nan_at, report_of
from support.summing import accumulation


@pytest.fixture(scope="module")
def minimax(models_dir):
    return rare_families.write("minimax_h3", models_dir / "diffusion_models" / "compiled_h3.safetensors")


@pytest.fixture(scope="module")
def loud(minimax):
    return families.write_scaled(minimax, minimax.with_name("loud_h3.safetensors"), rare_families.LOUD["minimax_h3"])


@pytest.fixture(scope="module")
def qwen(models_dir):
    return families.write_narrow("qwen_image", models_dir / "diffusion_models")


def sampled(model, steps=3):
    """A latent of a MiniMax H3 and the recorder of its run."""
    with comfy_compiler(MiniMaxH3Model) as recorder:
        latent = rare_families.sample(model, "minimax_h3", steps)
        assert not recorder.scopes
    return latent, recorder


def test_the_models_themselves_keep_the_contract(minimax, qwen):
    assert sampled(families.stock(minimax))[1].calls == 3
    with comfy_compiler() as recorder:
        families.sample(qwen_image21.loaded(qwen), "qwen_image", steps=3)
    assert recorder.calls == 3


@pytest.mark.parametrize(("compute", "recorded"), [("bf16", 3), ("fp16_safe", 2), ("fp32", 3)])
def test_calls_under_a_plan_keep_it(comfy, minimax, compute, recorded):
    """Where a plan is there, the first call measures, with the compiler off."""
    assert sampled(families.load(comfy, minimax, "as_file", compute))[1].calls == recorded


@pytest.mark.parametrize(("storage", "compute"), [("fp8_e4m3fn", "fp8"), ("int8", "int8")])
def test_8_bit_layers_with_a_lora_keep_it(comfy, minimax, ampere, storage, compute):
    layers = {f"blocks.{block}.mlp.fc2": (256, 512) for block in range(2)}
    model = families.load(comfy, minimax, storage, compute)
    model = load_lora_for_models(model, None, model_files.lora(layers, rank=4), 1.0, 0.0)[0]
    assert sampled(model)[1].calls >= 2


def test_fp16_sums_keep_it(comfy, minimax, ampere):
    model = accumulation(comfy, families.load(comfy, minimax, "fp16", "fp16"), fp16_accumulation="auto", attention="auto")
    assert sampled(model)[1].calls == 2


def test_blocks_that_run_otherwise_than_others_are_not_compiled(comfy, loud):
    """Block 1 has a layer that is scaled or in fp32, which allocates more than that of block 0."""
    assert sampled(families.load(comfy, loud, "as_file", "fp16_safe"))[1].calls == 0


def test_repeats_of_the_guard_and_what_it_widens_keep_it(comfy, loud):
    expected, _ = sampled(families.load(comfy, loud, "fp32", "fp32"))
    model = guarded(comfy, families.load(comfy, loud, "fp16", "fp16"))
    latent, recorder = sampled(model)
    assert report_of(model).verdict == "recovered" and (latent - expected).norm() < 0.02 * expected.norm()
    assert recorder.calls >= 1, "the first call, which failed"


def test_blocks_that_the_guard_widens_are_not_compiled(comfy, minimax):
    """Their results are cast back, and so made in one block and freed in the next."""
    model = guarded(comfy, families.load(comfy, minimax, "fp16", "fp16"))
    sampled(model)
    guard_of(model).states.last(model.model).grow(Escalation({}, frozenset({"blocks.0", "blocks.1"}), False, False))
    assert sampled(model)[1].calls == 0


def test_repeats_that_change_nothing_are_not_compiled_either(comfy, minimax):
    """A call that fails once is made again with every operation watched, and once more as it was."""
    model = guarded(comfy, inside(families.load(comfy, minimax, "fp16", "fp16"), nan_at(2)))
    assert sampled(model)[1].calls == 3 and report_of(model).verdict == "device_fault"


def test_a_check_keeps_it(comfy, minimax):
    """The call that is checked is watched by hooks that keep samples: it is not compiled either."""
    model = guarded(comfy, families.load(comfy, minimax, "fp16", "fp16"), check="first step")
    assert sampled(model)[1].calls == 2
    assert [one.left_out for one in report_of(model).checks] == [""]


@pytest.fixture
def failing(monkeypatch):
    """Block 1 of a MiniMax H3 raises in its third call."""
    from comfy.ldm.minimax.model import DiTBlock

    own, calls = DiTBlock.forward, []

    def run(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 4:
            raise RuntimeError("expected scalar type Half but found Float")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(DiTBlock, "forward", run)
    return calls


def test_a_call_that_is_made_again_after_an_error_finds_no_graph_open(comfy, minimax, failing):
    """As where model code fails on fp16 results: the call that failed left its graph open."""
    _, recorder = sampled(families.load(comfy, minimax, "as_file", "fp16_safe"))
    assert recorder.aborted == 1 and recorder.calls == 1 and len(failing) > 6


def test_an_error_leaves_no_graph_open(comfy, minimax, failing):
    with comfy_compiler(MiniMaxH3Model) as recorder:
        with pytest.raises(RuntimeError, match="scalar type"):
            rare_families.sample(guarded(comfy, families.load(comfy, minimax, "as_file", "bf16")), "minimax_h3", 3)
        assert recorder.aborted == 1 and not recorder.scopes


def qwen_sampled(model):
    with comfy_compiler() as recorder:
        families.sample(model, "qwen_image", steps=3)
        assert not recorder.scopes
    return recorder


@pytest.mark.parametrize(("compute", "recorded"), [("bf16", 3), ("fp16_safe", 2), ("fp32", 3)])
def test_a_graph_around_the_blocks_alone_is_kept_too(comfy, qwen, compute, recorded):
    plain = qwen_image21.loaded(qwen)
    assert qwen_sampled(families.with_compute(comfy, plain, compute)).calls == recorded
    assert plain.model.diffusion_model.filled == 3, "keys and values of three blocks, made once"


def test_a_guard_and_a_check_on_it_keep_it(comfy, qwen):
    model = guarded(comfy, families.with_compute(comfy, qwen_image21.loaded(qwen, loud=3e3), "fp16"))
    assert qwen_sampled(model).calls >= 1 and report_of(model).verdict == "recovered"
    model = guarded(comfy, families.with_compute(comfy, qwen_image21.loaded(qwen), "fp16"), check="first step")
    assert qwen_sampled(model).calls == 2 and report_of(model).checks[0].left_out == ""


def test_watching_for_clamps_keeps_nothing():
    with comfy_compiler() as recorder, ClampWatch(True, torch.device("cpu")) as watch:
        recorder.begin()
        for _ in range(2):
            recorder.iterate("block")
            torch.nan_to_num(torch.full((3,), 70000.0).half())
        recorder.iterate(None)
        recorder.end()
    assert watch.sizes()[0].isinf()


@pytest.mark.parametrize("what", ["analysis", "measurement", "calibration"])
def test_what_is_measured_is_not_compiled(comfy, minimax, what):
    model = families.load(comfy, minimax, "as_file", "bf16")
    given = rare_families.conditioning("minimax_h3"), None, {"samples": rare_families.latent("minimax_h3", model)}, 1
    with comfy_compiler(MiniMaxH3Model) as recorder:
        if what == "analysis":
            analyze_model(model, *given, "fp8_e4m3fn", 25.0, True)
        elif what == "calibration":
            calibrate_model(model, *given, None)
        else:
            measure_model(model, Inputs(*given), settings_from("as_file/fp16_safe\nint8/auto"))
    assert recorder.calls == 0


def test_the_compiler_stays_off_until_the_last_thread_has_left(monkeypatch):
    monkeypatch.setattr(comfy.cli_args.args, "disable_comfy_compiler", False, raising=False)
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with compiler_off():
            entered.set()
            leave.wait(10)
            seen.append(comfy.cli_args.args.disable_comfy_compiler)

    thread = threading.Thread(target=other)
    with compiler_off():
        thread.start()
        entered.wait(10)
    assert comfy.cli_args.args.disable_comfy_compiler is True
    leave.set()
    thread.join()
    assert seen == [True] and comfy.cli_args.args.disable_comfy_compiler is False


def test_a_compiler_that_the_user_turned_off_stays_off(monkeypatch):
    monkeypatch.setattr(comfy.cli_args.args, "disable_comfy_compiler", True, raising=False)
    with compiler_off():
        pass
    assert comfy.cli_args.args.disable_comfy_compiler is True


def test_a_comfyui_without_it_gets_no_setting(monkeypatch):
    monkeypatch.delattr(comfy.cli_args.args, "disable_comfy_compiler", raising=False)
    with compiler_off():
        assert not hasattr(comfy.cli_args.args, "disable_comfy_compiler")


@pytest.mark.parametrize("what", ["kept", "other"])
def test_the_recorder_sees_what_it_is_for(minimax, what):
    """A tensor that is kept over the end of a block, and one that block 0 alone has."""
    kept, model = [], families.stock(minimax)

    def hook(block, args):
        made = torch.empty(7).fill_(0) if what == "kept" or block is blocks[0] else None
        kept.append(made if what == "kept" else None)

    blocks = model.model.diffusion_model.blocks
    for block in blocks:
        block.register_forward_pre_hook(hook)
    with pytest.raises(GraphError, match="rogues" if what == "kept" else "one before it"), comfy_compiler(MiniMaxH3Model):
        rare_families.sample(model, "minimax_h3", 2)


def test_the_recorder_sees_a_graph_in_a_graph():
    with pytest.raises(GraphError, match="open"), comfy_compiler() as recorder:
        recorder.begin()
        recorder.begin()
