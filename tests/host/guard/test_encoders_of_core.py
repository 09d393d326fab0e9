"""Every VAE class and the text encoder classes of ComfyUI that overflow in fp16, guarded: results are finite and right, or a verdict comes with a cure."""

import contextlib
import functools

import pytest
import torch
from comfy import model_management
from comfy.text_encoders import gpt_oss
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE, guard_clip, guard_vae
from support import tiny_encoders, tiny_vaes
from support.guarding import is_finite
from support.measures import relative_error
from support.rows import all_of, the_rest_before_a_release

TILES = {"tile_x": 4, "tile_y": 4, "overlap": 1}
PIXEL_TILES = {"tile_x": 64, "tile_y": 64, "overlap": 8}
SOUND_TILES = {"tile_x": 16384, "tile_y": 1, "overlap": 4096}
NOT_CALLED = {
    ("hunyuan3d", "decode_tiled"): "its tokens have no place", ("cosmos", "encode"): "a CPU has no avg_pool3d in fp16", ("cosmos", "encode_tiled"): "as encode",
    ("hunyuan_image", "encode_tiled"): "ComfyUI raises in every dtype", ("ace", "encode_tiled"): "ComfyUI raises in every dtype", ("cogvideox", "decode_tiled"): "ComfyUI raises in every dtype",
}  # fmt: skip
TILED = {
    (tiny.latent and len(tiny.latent), tiny.pixels and len(tiny.pixels), bool(tiny.options)): name
    for name, tiny in tiny_vaes.VAES.items()
}.values()
"""One class for each number of dimensions: what is done in tiles is the same for all of them."""
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
    tiled = name in TILED
    return {
        action: functools.partial(drawn_alike, run)
        for action, run in found.items()
        if (name, action) not in NOT_CALLED and (tiled or "tiled" not in action)
    }


def drawn_alike(run, vae):
    torch.manual_seed(3)
    return run(vae)


@contextlib.contextmanager
def loud(layer, *vaes):
    """The VAEs with the weight of a layer as large as fp16 holds."""
    weights = []
    for vae in vaes:
        module = vae.first_stage_model.get_submodule(layer)
        weights.append(
            module.parametrizations.weight.original0 if hasattr(module, "parametrizations") else module.weight
        )
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
    loudest = {action: layer for (each, action), layer in LOUDEST.items() if each == name}
    for action, run in calls(name).items():
        found[action] = "no overflow"
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
    return (
        f"{log.verdict if error < bound else 'wrong'} in {log.events[0].to_mode}: {error:.1e} {log.events[0].evidence}"
    )


LOUDEST = {("ace", "decode"): "vocoder.head.ups.1"}
"""The first of its layers that overflows, of 88."""
RAISED = ("svd", "seedvr2", "oobleck", "stage_a")
"""Some of the classes that raised in every dtype but their own."""


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        *(("sm_75", name) for name in tiny_vaes.VAES),
        *the_rest_before_a_release([("sm_86", name) for name in ("oobleck", "stage_a")], all_of(["sm_86"], RAISED)),
    ],
)
def test_a_vae_that_overflows_comes_out_finite_and_right(comfy, monkeypatch, profile, name):
    if not tiny_vaes.is_known(name):
        pytest.skip("this ComfyUI does not have the class")
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    found = outcomes(name, profile)
    assert found and (name == "pixel_space" or all(one.startswith("recovered") for one in found.values())), found


def run_in_half(clip):
    """Have a text encoder compute as packs run it: in fp16 unless it was told to compute in fp32, and generate in fp16 where ComfyUI takes bf16."""
    model = clip.cond_stage_model
    network = model.tiny.transformer
    half, forward = clip.clone(), network.forward
    half.patcher.set_model_compute_dtype(torch.float16)
    if isinstance(network, gpt_oss.GptOssModel):
        return half  # in the dtype of its weights as it is

    def encode(ids, mask, embeds, **options):
        dtype = getattr(model, "manual_cast_dtype", torch.float32)
        return forward(ids, mask, embeds=embeds.to(dtype), **options | {"dtype": dtype})

    network.forward = encode
    if hasattr(network, "generate"):
        generate = network.generate

        def generated(*args, **options):
            dtype = torch.float16 if model_management.should_use_bf16(None) else torch.float32
            return generate(*args, execution_dtype=dtype, **options)

        network.generate = generated
    return half


@contextlib.contextmanager
def in_fp32(clip, monkeypatch):
    with monkeypatch.context() as each:
        each.setattr(model_management, "should_use_bf16", lambda *args, **options: False)
        each.setattr(clip.cond_stage_model.tiny.transformer, "dtype", torch.float32, raising=False)
        yield


def chosen(clip, tokens):
    return torch.tensor([clip.generate(tokens, max_length=2, do_sample=False)], dtype=torch.float32)


def calls_of_text(name):
    """Action -> the call, and whether its result is finite: by NaN, the first token is chosen."""
    tiny, tokens = tiny_encoders.ENCODERS[name], tiny_encoders.tokens()
    found = {"generate": (lambda clip: chosen(clip, tokens), torch.any)} if tiny.generates else {}
    if tiny.encodes:
        found["encode"] = lambda clip: clip.encode_from_tokens(tokens), is_finite
        found["scheduled"] = lambda clip: clip.encode_from_tokens_scheduled(tokens)[0][0], is_finite
    return found


def layers_of_text(clip):
    """The layers of a text encoder, from the middle one on."""
    layers = [
        module
        for module in clip.cond_stage_model.modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() == 2
    ]
    return layers[len(layers) // 2 :] + layers[: len(layers) // 2]


@contextlib.contextmanager
def as_loud_as_fp16(module):
    kept = module.weight.clone()
    module.weight.copy_(kept.float() * (tiny_vaes.LARGEST / kept.float().abs().amax()))
    yield
    module.weight.copy_(kept)


@pytest.mark.parametrize("name", [name for name in tiny_encoders.ENCODERS if tiny_encoders.is_known(name)])
def test_text_encoders_that_overflow_come_out_finite_and_right(comfy, monkeypatch, name):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    clip = tiny_encoders.build(name)
    half, layers, found = run_in_half(clip), layers_of_text(clip), {}
    monkeypatch.setattr(model_management, "should_use_bf16", lambda *args, **options: True)
    for action, (run, finite) in calls_of_text(name).items():
        for layer in list(layers):
            with as_loud_as_fp16(layer):
                if finite(run(half)):
                    continue
                with in_fp32(clip, monkeypatch):
                    exact = run(clip)
                if not finite(exact):
                    continue
                guarded = guard_clip(half, "retry_higher")
                result, log = run(guarded), getattr(guarded, ATTRIBUTE).log
                found[action] = log.verdict, log.events[0].to_mode, relative_error(exact, result) < 0.001
                layers.sort(key=lambda each: each is not layer)
                break
    assert set(found) == set(calls_of_text(name)) and set(found.values()) == {("recovered", "fp32", True)}, found
