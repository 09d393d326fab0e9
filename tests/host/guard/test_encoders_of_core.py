"""Every VAE class of ComfyUI that overflows in fp16, guarded: its result is finite and right, or a verdict comes with a cure."""

import contextlib
import functools

import pytest
import torch
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE, guard_vae
from support import tiny_vaes
from support.guarding import is_finite
from support.measures import relative_error

TILES = {"tile_x": 4, "tile_y": 4, "overlap": 1}
PIXEL_TILES = {"tile_x": 64, "tile_y": 64, "overlap": 8}
SOUND_TILES = {"tile_x": 16384, "tile_y": 1, "overlap": 4096}
NOT_CALLED = {
    ("hunyuan3d", "decode_tiled"): "its tokens have no place", ("cosmos", "encode"): "a CPU has no avg_pool3d in fp16", ("cosmos", "encode_tiled"): "as encode",
    ("hunyuan_image", "encode_tiled"): "ComfyUI raises in every dtype", ("ace", "encode_tiled"): "ComfyUI raises in every dtype", ("cogvideox", "decode_tiled"): "ComfyUI raises in every dtype",
}  # fmt: skip
LOOSE = {"oobleck": 0.2}
"""Its toy is chaotic: fp16's rounding of the weights' norms alone is 0.03 at the result."""


def calls(name):
    tiny = tiny_vaes.VAES[name]
    found = {}
    if tiny.latent:
        options = [tiny.options] if tiny.options else []
        found["decode"] = lambda vae: vae.decode(tiny_vaes.latent(name), *options)
        found["decode_tiled"] = lambda vae: vae.decode_tiled(tiny_vaes.latent(name), **TILES)
    if tiny.pixels:
        found["encode"] = lambda vae: vae.encode(tiny_vaes.pixels(name))
        tiles = SOUND_TILES if len(tiny.pixels) == 3 else PIXEL_TILES
        found["encode_tiled"] = lambda vae: vae.encode_tiled(tiny_vaes.pixels(name), **tiles)
    return {action: functools.partial(drawn_alike, run) for action, run in found.items() if (name, action) not in NOT_CALLED}


def drawn_alike(run, vae):
    torch.manual_seed(3)
    return run(vae)


@contextlib.contextmanager
def loud(layer, *vaes):
    """The VAEs with the weight of a layer as large as fp16 holds."""
    weights = []
    for vae in vaes:
        module = vae.first_stage_model.get_submodule(layer)
        weights.append(module.parametrizations.weight.original0 if hasattr(module, "parametrizations") else module.weight)
    kept = [weight.clone() for weight in weights]
    for weight, before in zip(weights, kept, strict=True):
        weight.copy_((before.float() * (tiny_vaes.LARGEST / before.float().abs().amax())).half())
    try:
        yield
    finally:
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)


def layers_of(vae, run):
    """The layers that a call runs, from the one in its middle outwards."""
    order, hooks = [], []
    for layer, module in vae.first_stage_model.named_modules():
        if "parametrizations" not in layer and getattr(module, "weight", None) is not None and module.weight.dim() > 1:
            hooks.append(module.register_forward_hook(lambda *args, layer=layer: order.append(layer)))
    run(vae)
    for hook in hooks:
        hook.remove()
    order = list(dict.fromkeys(order))
    return sorted(order, key=lambda layer: abs(order.index(layer) - len(order) // 2))


def outcomes(name, profile):
    """Action -> what the guard made of a call of it that overflows."""
    exact, half, found = tiny_vaes.build(name, torch.float32), tiny_vaes.build(name, torch.float16), {}
    loudest = {}
    for action, run in calls(name).items():
        found[action] = "no overflow"
        try:
            run(half)
        except Exception as error:
            found[action] = f"core raises {error}"
            continue
        known = loudest.get(action.partition("_")[0])
        for layer in [known] if known else layers_of(exact, run):
            loudest[action] = layer
            with loud(layer, half, exact):
                if is_finite(run(half)):
                    continue
                reference = run(exact)
                if is_finite(reference):
                    found[action] = outcome(half, run, reference, LOOSE.get(name, 0.02) if profile == "sm_75" else 1.0)
                    break
    return found


def outcome(vae, run, reference, bound):
    guarded = guard_vae(vae, "retry_higher")
    try:
        result = run(guarded)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    log, error = getattr(guarded, ATTRIBUTE).log, relative_error(reference, result)
    return f"{log.verdict if error < bound else 'wrong'} in {log.events[0].to_mode}: {error:.1e} {log.events[0].evidence}"


RAISED = ("svd", "seedvr2", "oobleck", "stage_a")
"""Some of the classes that raised in every dtype but their own."""


@pytest.mark.parametrize("profile", ["sm_75", "sm_86"])
def test_every_vae_that_overflows_comes_out_finite_and_right(comfy, monkeypatch, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    table = {name: outcomes(name, profile) for name in filter(tiny_vaes.is_known, tiny_vaes.VAES if profile == "sm_75" else RAISED)}
    text = "\n".join(f"{name:22}{action:14}{found}" for name, row in table.items() for action, found in row.items())
    print(text)
    assert all(found.startswith("recovered") for name, row in table.items() for found in row.values() if name != "pixel_space"), text
