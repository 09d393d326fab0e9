"""Caches that keep what `fp16_safe` follows between a block's layers: a norm's result, a modulated one, a GELU's."""

import pytest
import torch
from halfsafe.nodes.host.run.compute import compute_of
from support import families
from support.caches import PLACES, STEPS, with_cache
from support.families import load
from support.guarding import guarded, inside, report_of
from support.measures import relative_error


def of_block(model) -> torch.nn.Module:
    return model.model.diffusion_model.blocks[0]


KEPT = {"norm": lambda block: block.norm1, "modulated": lambda block: block.self_attn.q, "gelu": lambda block: block.ffn[1]}


@pytest.fixture
def in_block(request):
    """Puts a cache of one module's result, or of its input, into a block: it computes one call of four, and holds all it kept."""
    hooks, kept = [], []

    def put(model, of, place):
        for hook in hooks:
            hook.remove()
        hooks.clear()
        read, write = PLACES[place]()

        def cached(own):
            count, held = read(model.model, {}) or (0, None)
            result = own if held is None or count % STEPS == 0 else held.float() * put.growth
            kept.append(result)
            write(model.model, {}, (count + 1, result))
            return result

        module = KEPT[of](of_block(model))
        if of == "modulated":
            hooks.append(module.register_forward_pre_hook(lambda module, inputs: (cached(inputs[0]),)))
        else:
            hooks.append(module.register_forward_hook(lambda module, inputs, result: cached(result)))

        def change(executor, args, kwargs, reached=(read, write)):
            return executor(*args, **kwargs)

        return with_cache(model, place, lambda model, *_: inside(model, change))

    put.kept, put.growth = kept, 1.0
    yield put
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("place", ["closure", "dict with weak keys", "attribute of the model"])
@pytest.mark.parametrize("of", KEPT)
def test_what_is_kept_within_a_block_is_plain_and_shows_in_no_check(comfy, wan, in_block, of, place):
    latents = {}
    for check in ("off", "first step"):
        model = in_block(load(comfy, wan, "as_file", "fp16_safe"), of, place)
        model = guarded(comfy, model, check=check)
        latents[check] = families.sample(model, "wan", steps=STEPS)
        assert {type(each) for each in in_block.kept} == {torch.Tensor}
    assert torch.equal(*latents.values())
    assert all(one.left_out == "" for one in report_of(model).checks)
    assert compute_of(model).runs.of(model.model).calibration.repeats <= 1
    fp32 = families.sample(in_block(load(comfy, wan, "as_file", "fp32"), of, place), "wan", steps=STEPS)
    assert relative_error(fp32, latents["off"]) < 2e-2


@pytest.mark.parametrize("of", KEPT)
def test_what_is_kept_and_grows_is_measured_again(comfy, wan, call, in_block, of):
    model = in_block(load(comfy, wan, "as_file", "fp16_safe"), of, "closure")
    for _ in range(2):
        families.replay(model, call)
    in_block.growth = 3e5
    assert torch.isfinite(families.replay(model, call)).all()
    assert compute_of(model).runs.of(model.model).calibration.repeats == 1
