"""What model code makes of a value past fp16's range so that the result is finite and wrong: ``auto`` sees it all the same."""

import pytest
import torch
import torch.nn.functional as F
from comfy.ldm.modules import attention
from comfy.ldm.wan import model as wan
from halfsafe.nodes.host.guard import clamps
from support import families, tiny_models
from support.families import load, with_compute
from support.guarding import report_of
from support.measures import relative_error

BOUND = 60000.0
LOUD = 3e5


def in_place(name: str, *bounds):
    return lambda x: getattr(x * LOUD, name)(*bounds)


def norm_by_hand(x):
    return x * torch.rsqrt((x * 1e3).pow(2).mean(-1, keepdim=True))


def divided_by_a_norm(x):
    return x * 1e3 / torch.norm(x * 1e3, p=1, dim=-1, keepdim=True)


# How model code hides it: (what it makes of values around 1, the functions that are watched for it).
WAYS = {
    "torch.nan_to_num": (lambda x: torch.nan_to_num(x * LOUD, 0.0, BOUND, -BOUND), "nan_to_num"),
    "nan_to_num()": (lambda x: (x * LOUD).nan_to_num(0.0, BOUND, -BOUND), "nan_to_num"),
    "nan_to_num_()": (in_place("nan_to_num_", 0.0, BOUND, -BOUND), "nan_to_num_"),
    "torch.clamp": (lambda x: torch.clamp(x * LOUD, -BOUND, BOUND), "clamp"),
    "clamp_()": (in_place("clamp_", -BOUND, BOUND), "clamp_"),
    "clip()": (lambda x: (x * LOUD).clip(-BOUND, BOUND), "clip"),
    "clamp_max()": (lambda x: (x.abs() * LOUD).clamp_max(BOUND), "clamp_max"),
    "torch.minimum": (lambda x: torch.minimum(x.abs() * LOUD, torch.full_like(x, BOUND)), "minimum"),
    "hardtanh": (lambda x: F.hardtanh(x * LOUD, -BOUND, BOUND), "hardtanh"),
    "where isfinite": (lambda x: torch.where(torch.isfinite(x * LOUD), x * LOUD, 0.0), "isfinite"),
    "mask of isinf()": (lambda x: (x * LOUD).masked_fill((x * LOUD).isinf(), 0.0), "isinf"),
    "gate of tanh": (lambda x: torch.tanh(x * LOUD * 1e-5), "tanh"),
    "gate of sigmoid()": (lambda x: F.sigmoid(x * LOUD * 1e-5), "sigmoid"),
    "relu": (lambda x: F.relu(-x.abs() * LOUD), "relu"),
    "norm by hand": (norm_by_hand, "rsqrt"),
    "division by a norm": (divided_by_a_norm, "__truediv__"),
    "torch.div": (lambda x: torch.div(torch.full_like(x, BOUND), 1 + (x * LOUD).abs()), "div"),
    "a scalar divided": (lambda x: 1e4 / (1 + (x * LOUD).abs()), "reciprocal"),
    "a negative power": (lambda x: (1 + (x * LOUD).abs()) ** -1.0, "__pow__"),
    "erf": (lambda x: torch.erf(x * LOUD * 1e-5), "erf"),
    "atan": (lambda x: torch.atan(x * LOUD * 1e-5), "atan"),
    "elu": (lambda x: F.elu(-x.abs() * LOUD), "elu"),
    "selu": (lambda x: F.selu(-x.abs() * LOUD), "selu"),
    "softplus": (lambda x: F.softplus(-x.abs() * LOUD), "softplus"),
}


@pytest.fixture(scope="module")
def path(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "hidden.safetensors", torch.float16, blocks=1)


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")


def hiding(model, way):
    """The model with a block that adds what ``way`` makes of its result."""
    clone = model.clone()

    def block(arguments: dict, extra: dict) -> dict:
        img = extra["original_block"](arguments)["img"]
        return {
            "img": img
            + 0.1 * way(img / img.abs().amax()).to(img.dtype) / (BOUND if "BOUND" in way.__code__.co_names else 1.0)
        }

    clone.set_model_patch_replace(block, "dit", "double_block", 0)
    return clone


def verdict_of(comfy, path, way) -> tuple[str, bool]:
    """(the verdict of ``auto`` on a model that hides an overflow, whether its picture is the one of ``fp16_safe``)"""
    plain = hiding(load(comfy, path, "as_file", "fp16"), way)
    assert torch.isfinite(families.sample(plain, "wan", steps=1)).all(), "the overflow is hidden"
    expected = families.sample(with_compute(comfy, plain, "fp16_safe"), "wan", steps=1)
    model = with_compute(comfy, plain, "auto")
    found = families.sample(model, "wan", steps=1)
    return report_of(model).verdict, relative_error(expected, found) < 1e-3


@pytest.mark.parametrize("name", WAYS)
def test_an_overflow_that_model_code_hides_is_seen_by_its_watch_alone(comfy, path, monkeypatch, name):
    way, watched = WAYS[name]
    assert verdict_of(comfy, path, way) == ("recovered", True)
    left = [entry for entry in clamps.WATCHED if entry[1] != watched]
    assert len(left) < len(clamps.WATCHED)
    monkeypatch.setattr(clamps, "WATCHED", left)
    assert verdict_of(comfy, path, way)[0] == "off"


def test_what_is_watched_is_exchanged_once_in_a_run_and_then_as_it_was(comfy, path, monkeypatch):
    before, entered, make = [dict(vars(owner)) for owner in (torch, torch.Tensor, F)], [], clamps.hiding_is_seen._make
    monkeypatch.setattr(clamps.hiding_is_seen, "_make", lambda: entered.append(1) or make())
    families.sample(with_compute(comfy, load(comfy, path, "as_file", "fp16"), "auto"), "wan", steps=3)
    assert [dict(vars(owner)) for owner in (torch, torch.Tensor, F)] == before and entered == [1]


@pytest.mark.parametrize("kernel", ["attention_basic", "attention_split", "attention_sub_quad"])
def test_scores_past_the_range_of_fp16_leave_no_token_out(comfy, path, monkeypatch, kernel):
    """An unfused kernel has its scores in fp16: those below its range are -inf, which the softmax makes 0 without a word."""
    for module in (attention, wan):
        monkeypatch.setattr(module, "optimized_attention", getattr(attention, kernel))
    seen = []
    monkeypatch.setattr(attention, "get_attn_precision", lambda asked, dtype: seen.append((asked, dtype)) or asked)
    plain = load(comfy, path, "as_file", "fp16")
    families.sample(plain, "wan", steps=1)
    assert {asked for asked, _ in seen} == {None}
    seen.clear()
    model = with_compute(comfy, plain, "auto")
    families.sample(model, "wan", steps=1)
    assert set(seen) == {(torch.float32, torch.float16)} and report_of(model).verdict == "off"
