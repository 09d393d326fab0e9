"""`fp16_safe`, fp8 and int8 under the guard on families whose sizes ComfyUI fixes, where they overflow fp16; MiniMax H3 in every way."""

import os
from statistics import median
from unittest.mock import patch

import pytest
import torch
from support import families, rare_families
from support.families import load
from support.guarding import guarded, report_of
from support.measures import relative_error
from support.rows import the_rest_before_a_release

ROUTED = "hidream"  # to other experts where a score is rounded: bf16, fp16 and fp16_safe are equally far from fp32
CASES = [(family, kind) for family, kinds in rare_families.OVERFLOWS.items() if family != ROUTED for kind in kinds]
TEXTS = {"attention": 3}
"""Attention that overflows fp16 takes one token each, and of two that are nearly equal either: a median says less of chance."""
WAYS = {
    "fp16": ("fp16", "fp16", "cpu"),
    "bf16": ("as_file", "bf16", "cpu"),
    "fp16_safe": ("as_file", "fp16_safe", "cpu"),
    "fp8 storage, fp16_safe": ("fp8_e4m3fn", "fp16_safe", "cpu"),
    "fp8": ("fp8_e4m3fn", "fp8", "sm_89"),
    "int8 storage, fp16_safe": ("int8", "fp16_safe", "cpu"),
    "int8": ("int8", "int8", "cpu"),
}
"""Storage, compute, device profile."""
MEANT = {way: "recovered" if way == "fp16" else "clean" for way in WAYS}


@pytest.fixture(scope="module")
def loud(models_dir):
    """(family, kind) -> the file of that model; ``clean`` is one of the kinds."""
    made = {}

    def get(family, kind):
        if family not in made:
            made[family] = rare_families.write(
                family, models_dir / "diffusion_models" / f"compute_{family}.safetensors"
            )
        factors = rare_families.OVERFLOWS[family].get(kind, {})
        return families.write_scaled(made[family], made[family].with_name("loud.safetensors"), factors)

    return get


def measured(comfy, family, path, ways, texts):
    """Way -> (the final latent's relative error against fp32 with the weights of the file, the median of so many texts; the guard's verdict on the first)."""
    conds = [rare_families.conditioning(family, seed=seed + 1) for seed in range(texts)]
    exact, found = load(comfy, path, "fp32", "fp32"), {}
    references = [rare_families.sample(exact, family, 2, cond) for cond in conds]
    for way in ways:
        storage, compute, profile = WAYS[way]
        with patch.dict(os.environ, HALFSAFE_DEVICE_PROFILE=profile):
            model = guarded(comfy, load(comfy, path, storage, compute))
            results = [rare_families.sample(model, family, 2, conds[0])]
            verdict = report_of(model).verdict
            results += [rare_families.sample(model, family, 2, cond) for cond in conds[1:]]
        found[way] = median(map(relative_error, references, results)), verdict
    return found


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_fp16_safe_is_clean_and_at_most_six_tenths_of_the_error_of_bf16(comfy, loud, family, kind):
    path = loud(family, kind)
    assert not torch.isfinite(rare_families.sample(load(comfy, path, "fp16", "fp16"), family, 1)).all(), (
        "plain fp16 was to overflow"
    )
    found = measured(comfy, family, path, ("bf16", "fp16_safe"), TEXTS.get(kind, 1))
    assert [verdict for _, verdict in found.values()] == ["clean", "clean"]
    assert found["fp16_safe"][0] <= 0.6 * found["bf16"][0]


KINDS_OF_MINIMAX = [(kind,) for kind in ("clean", *rare_families.OVERFLOWS["minimax_h3"])]


@pytest.mark.parametrize(("kind",), the_rest_before_a_release([("ffn",), ("text adapter",)], KINDS_OF_MINIMAX))
def test_a_minimax_h3_in_every_storage_and_compute(comfy, loud, kind):
    path = loud("minimax_h3", kind)
    found = measured(comfy, "minimax_h3", path, WAYS, TEXTS.get(kind, 1))
    errors = {way: error for way, (error, _) in found.items()}
    meant = (
        dict.fromkeys(MEANT, "clean") if kind in ("clean", "text adapter") else MEANT
    )  # a guard runs adapters in fp32
    assert {way: verdict for way, (_, verdict) in found.items()} == meant
    assert max(errors["fp16"], errors["fp16_safe"]) <= 0.6 * errors["bf16"] and errors["fp8"] < 0.2
    of_storage = errors_of_scores(comfy, path) if kind == "attention" else errors
    assert (
        max(of_storage["int8"], of_storage["int8 storage, fp16_safe"])
        < of_storage["fp8 storage, fp16_safe"]
        <= of_storage["fp8"]
    )


def errors_of_scores(comfy, path):
    """Way -> the relative error of what the first block's softmax is given: one other token is more than any storage's rounding."""
    exact = scores(load(comfy, path, "fp32", "fp32"))
    found = {}
    for way, (storage, compute, profile) in WAYS.items():
        if storage in ("int8", "fp8_e4m3fn"):
            with patch.dict(os.environ, HALFSAFE_DEVICE_PROFILE=profile):
                found[way] = relative_error(exact, scores(load(comfy, path, storage, compute)))
    return found


def scores(model):
    """The products of query and key in the first of a MiniMax H3's blocks: text alone comes before it."""
    from comfy.ldm.minimax import model as minimax

    found, attention = [], minimax.optimized_attention

    def watched(q, k, *rest, **options):
        found.append(q.double() @ k.double().mT)
        return attention(q, k, *rest, **options)

    with patch.object(minimax, "optimized_attention", watched):
        rare_families.sample(model, "minimax_h3", 1)
    return next(one for one in found if one.shape != found[0].shape)
