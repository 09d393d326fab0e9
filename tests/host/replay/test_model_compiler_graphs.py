"""Repeats inside of one node beside ComfyUI's CUDA graphs, which replay a block as it was recorded for as long as its pages stay."""

import contextlib
from types import SimpleNamespace

import comfy.cli_args
import comfy.model_prefetch
import pytest
import torch
from comfy import model_management
from comfy.ldm.wan.model import WanAttentionBlock
from comfy.sd import load_lora_for_models
from comfy.text_encoders.llama import Attention, TransformerBlock
from halfsafe.nodes.host.comfyui.attributes import without_compiler
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE, TokenChoice, guard_clip
from halfsafe.nodes.host.lora.patcher import keep_low_rank_unmerged
from support import families, plants, tiny_encoders
from support.guarding import guarded, plain_fp16, report_of
from support.imagined_cores import changed, never_called

ARGUMENTS = comfy.cli_args.args


@contextlib.contextmanager
def recorded_blocks(block: type):
    """Record each run of a block, and replay it where the same block is to run at the same place again.

    ``prefetch_queue_pop`` of ``comfy/model_prefetch.py`` (0.33) does so for the decode blocks of text encoders: on a hit it runs the graph in place of
    ``core()``. Graphs are dropped by ``cleanup_prefetch_queues``, which ComfyUI calls after a node, and are off by ``--disable-cuda-graphs``.
    Yields what was replayed.
    """
    recorded, replayed = {}, []
    forward, cleanup = block.forward, comfy.model_prefetch.cleanup_prefetch_queues

    def run(self, x, *args, **kwargs):
        places = [
            each for each in (kwargs.get("e"), *(kwargs.get("freqs_cis") or ())) if isinstance(each, torch.Tensor)
        ]
        key = id(self), x.shape, *(each.double().sum().item() for each in places)
        if ARGUMENTS.disable_cuda_graphs:
            return forward(self, x, *args, **kwargs)
        if key in recorded:
            replayed.append(key)
        else:
            recorded[key] = forward(self, x, *args, **kwargs)
        return recorded[key]

    def dropped():
        recorded.clear()
        cleanup()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ARGUMENTS, "disable_cuda_graphs", False, raising=False)
        patch.setattr(comfy.model_prefetch, "cleanup_prefetch_queues", dropped)
        patch.setattr(block, "forward", run)
        yield replayed
        assert ARGUMENTS.disable_cuda_graphs is False, "left off"


@pytest.fixture
def loud_qwen(monkeypatch):
    """(a text encoder that generates in fp16 where ComfyUI takes bf16, and overflows there; its tokens in fp32)"""
    clip = tiny_encoders.build("qwen3")
    network = clip.cond_stage_model.tiny.transformer
    generate = network.generate

    def generated(*args, **options):
        dtype = torch.float16 if model_management.should_use_bf16(None) else torch.float32
        return generate(*args, execution_dtype=dtype, **options)

    network.generate = generated
    weight = network.model.layers[2].mlp.down_proj.weight
    weight.copy_(weight.float() * (6e4 / weight.float().abs().amax()))
    monkeypatch.setattr(model_management, "should_use_bf16", lambda *args, **options: False)
    exact = tokens_of(clip)
    monkeypatch.setattr(model_management, "should_use_bf16", lambda *args, **options: True)
    assert any(exact) and tokens_of(clip) != exact
    return clip, exact


def tokens_of(clip) -> list:
    return clip.generate(tiny_encoders.tokens(), max_length=3, do_sample=False)


def test_a_text_that_is_generated_again_runs_its_blocks_again(comfy, loud_qwen):
    clip, exact = loud_qwen
    with recorded_blocks(TransformerBlock) as replayed:
        model = guard_clip(clip, "retry_higher")
        assert tokens_of(model) == exact and not replayed
    assert getattr(model, ATTRIBUTE).log.verdict == "recovered"


def test_a_text_that_is_generated_again_with_its_lora_runs_its_blocks_again():
    """The first attempt shows that ComfyUI multiplies past some layers, so that their LoRAs are to be added to weights."""
    plain = Attention.forward
    with never_called(Attention, "q_proj", "k_proj", "v_proj"):
        together = Attention.forward

    def forward(self, hidden_states, *args, **kwargs):
        return (plain if hidden_states.shape[1] > 1 else together)(self, hidden_states, *args, **kwargs)

    clip = tiny_encoders.build("qwen3")
    transformer = clip.cond_stage_model.tiny.transformer
    for name, module in clip.cond_stage_model.named_modules():
        if name.endswith("_proj"):
            module.weight = torch.nn.Parameter(module.weight.to(torch.float8_e4m3fn), requires_grad=False)
    places = (f"model.layers.{number}.self_attn.{part}_proj" for number in range(2) for part in "qk")
    lora = {}
    for name in places:
        rows, columns = transformer.get_submodule(name).weight.shape
        lora |= {f"text_encoders.tiny.transformer.{name}.lora_up.weight": torch.full((rows, 2), 0.1)}
        lora |= {f"text_encoders.tiny.transformer.{name}.lora_down.weight": torch.full((2, columns), 0.1)}
    keep_low_rank_unmerged(clip.patcher)
    clip = load_lora_for_models(None, clip, lora, 0.0, 1.0)[1]
    with changed(Attention, "forward", forward), recorded_blocks(TransformerBlock) as replayed:
        tokens_of(clip)
    assert clip.patcher.low_rank_model().by_weight and not replayed


def test_a_call_of_a_model_that_is_repeated_runs_its_blocks_again(comfy, models_dir):
    path = families.write("wan", models_dir / "diffusion_models")
    model = guarded(comfy, plain_fp16(comfy, path))
    expected = families.sample(model, "wan", steps=2)
    with recorded_blocks(WanAttentionBlock) as replayed, plants.fault(model, plants.FAMILIES["wan"].layer):
        assert torch.equal(families.sample(model, "wan", steps=2), expected) and not replayed
    assert report_of(model).verdict == "device_fault"


def test_no_number_is_read_while_a_graph_is_recorded(monkeypatch):
    """MiniMax Music chooses its codes inside of a graph (``comfy/ldm/minimax_music/ar.py``, 0.33)."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choice = TokenChoice(goes_on=False)
    choice._look(SimpleNamespace(is_cuda=True))
    assert choice.failed is None


def test_only_switches_that_this_comfyui_has_are_turned_off():
    assert without_compiler(SimpleNamespace()) == []
    arguments = SimpleNamespace(disable_cuda_graphs=False)
    assert without_compiler(arguments) == [(arguments, "disable_cuda_graphs", True)]
