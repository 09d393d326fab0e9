"""Who reads what is written: each kind of file in each storage, converted and loaded in ComfyUI alone, beside what the table says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import comfyui_version
import pytest
import torch
from comfy.ops import disable_weight_init
from comfy.sd import CLIPType, load_checkpoint_guess_config, load_clip
from comfy.text_encoders import sd3_clip
from comfy.text_encoders.llama import Qwen3_06B
from comfy.text_encoders.t5 import T5
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.formats.checkpoint import Checkpoint
from halfsafe.precision.formats.readers import CLIP, LANGUAGE_MODEL, MINIMAX_VAE, MODEL, SMALL_ENCODER, VAE, read_by
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.formats.stored_weight import StoredWeight
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import (
    control_files,
    diffusers_names,
    families,
    model_files,
    saved_models,
    tiny_encoders,
    tiny_models,
    tiny_vaes,
)
from support.measures import relative_error
from support.rows import all_of, the_rest_before_a_release

LIMITS = {"int8": 0.06, "fp8_e4m3fn": 0.13, "fp8_e5m2": 0.25, "mxfp8": 0.13, "nvfp4": 0.5}
"""The largest relative error of a result in a storage against the source in fp32; a wrong file has 0.6 and more."""
WRONG = 0.6
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
T5_XXL = {"d_model": 32, "d_ff": 10240, "d_kv": 16, "num_heads": 2, "num_layers": 24, "vocab_size": 128}
CLIP_L = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 1024, "num_attention_heads": 4}
TOKENS = [[(1 + number % 97, 1.0) for number in range(77)]]


class Tool(NamedTuple):
    """``write``: writes a small file of the kind; ``stock`` and ``ours``: file -> the result of what ComfyUI alone, and the pack, makes of it; ``exact``: the same of the source, where ``stock`` does not read that."""

    write: Callable[[Path], Path]
    stock: Callable[[Path], torch.Tensor]
    ours: Callable[[Path], torch.Tensor] | None = None
    exact: Callable[[Path], torch.Tensor] | None = None


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    control_files.narrow(monkeypatch)


def captured(comfy, family, path):
    source = diffusers_names.FAMILIES[family](path)
    return source, families.capture(families.load(comfy, source), family)


@pytest.fixture(scope="module")
def flux(comfy, models_dir):
    return captured(comfy, "flux", models_dir / "diffusion_models" / "for_readers.safetensors")


@pytest.fixture(scope="module")
def unet(comfy, models_dir):
    return captured(comfy, "sd15", models_dir / "diffusion_models" / "unet_for_readers.safetensors")


def model_tool(comfy, flux, start=""):
    source, call = flux

    def write(path):
        save_file({start + name: tensor for name, tensor in load_file(source).items()}, path)
        return path

    return Tool(write, lambda path: families.replay(families.stock(path), call))


def renamed_by_convert(comfy, flux):
    """ComfyUI alone does not load the source."""
    tool = model_tool(comfy, flux, "diffusion_model.")
    return tool._replace(exact=lambda _: tool.stock(flux[0]))


def shards(comfy, flux):
    tool = model_tool(comfy, flux)
    write = lambda path: model_files.in_parts(flux[0], path.parent, path.stem)[0]  # noqa: E731
    return tool._replace(write=write, exact=lambda _: tool.stock(flux[0]))


def diffusers(comfy, family, models_dir):
    source, call = captured(comfy, family, models_dir / "diffusion_models" / f"{family}_for_readers.safetensors")
    stock = lambda path: families.replay(families.stock(path), call)  # noqa: E731
    return Tool(lambda path: diffusers_names.write(family, source, path), stock, exact=lambda _: stock(source))


def checkpoint(comfy, unet):
    source, call = unet

    def write(path):
        parts = {"model.diffusion_model.": load_file(source), "cond_stage_model.transformer.": clip_tensors()}
        save_file({start + name: it for start, part in parts.items() for name, it in part.items()}, path)
        return path

    def stock(path):
        patcher = load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]
        patcher.set_model_compute_dtype(torch.float32)
        return families.replay(patcher, call)

    return Tool(write, stock)


def controlnet(comfy, _):
    def stock(path):
        loaded = comfy.core["ControlNetLoader"]().load_controlnet(path.name)[0]
        loaded.control_model.dtype = loaded.manual_cast_dtype = torch.float32
        loaded.control_model.float()
        return control_files.give(loaded, "flux")

    def ours(path):
        inputs = {"control_net_name": path.name, "storage": "as_file", "compute": "fp32"}
        return control_files.give(comfy.run("HalfsafeLoadControlNet", **inputs)[0], "flux")

    return Tool(control_files.flux, stock, ours)


def encoder_tool(write, name, sizes, kind):
    def stock(path):
        clip = load_clip([str(path)], clip_type=kind, model_options=dict(sizes))
        return getattr(clip.cond_stage_model, name).encode_token_weights(TOKENS)[0].float()

    return Tool(write, stock)


def clip_tensors():
    shapes = tiny_models.clip_l_shapes(CLIP_L["hidden_size"], CLIP_L["num_hidden_layers"])
    return dict(tiny_models.tensors_of_shapes(shapes, torch.float16, 0))


def clip(comfy, _):
    def write(path):
        save_file(clip_tensors(), path)
        return path

    def ours(path):
        inputs = {"clip_name1": path.name, "type": "stable_diffusion", "storage": "as_file", "compute": "auto"}
        loaded = comfy.run("HalfsafeLoadCLIP", **inputs)[0]
        return loaded.cond_stage_model.clip_l.encode_token_weights(TOKENS)[0].float()

    sizes = {"model_config": CLIP_L}
    return encoder_tool(write, "clip_l", sizes, CLIPType.STABLE_DIFFUSION)._replace(ours=ours)


def written(cls, config, of_branches=1.0):
    """``of_branches``: factor of what a block adds, for a toy of so many blocks that it multiplies its rounding errors."""

    def write(path):
        module = cls(config, torch.float32, "meta", disable_weight_init)
        shapes = tiny_models.shapes_of(module)
        factors = {name: of_branches for name in shapes if name.endswith((".q.weight", ".o.weight", ".wo.weight"))}
        return tiny_models.write_shapes(path, shapes, torch.float16, 0, scale=factors)

    return write


def qwen3(_, __):
    write = written(Qwen3_06B, QWEN3)
    return encoder_tool(write, "qwen3_06b", {"qwen3_06b_model_config": QWEN3}, CLIPType.STABLE_DIFFUSION)


def t5_xxl(_, __):
    config = Path(sd3_clip.__file__).with_name("t5_config_xxl.json").read_text()
    write = written(T5, json.loads(config) | T5_XXL, 0.1)
    return encoder_tool(write, "t5xxl", {"t5xxl_model_config": T5_XXL}, CLIPType.SD3)


def vae_tool(name):
    def write(path):
        save_file(
            {
                k: it.contiguous()
                for k, it in tiny_vaes.build(name, torch.float32).first_stage_model.state_dict().items()
            },
            path,
        )
        return path

    def stock(path):
        made = tiny_vaes.build(name, torch.float32)
        with torch.inference_mode(False), torch.no_grad():  # as ComfyUI's VAE does with the tensors of a file
            made.first_stage_model.load_state_dict(load_file(path), strict=False)
        return made.decode(tiny_vaes.latent(name)).float()

    return Tool(write, stock)


KINDS = {
    "model": ("diffusion_models", "flux", model_tool),
    "model with a prefix": ("diffusion_models", "flux", lambda c, flux: model_tool(c, flux, "model.diffusion_model.")),
    "model with another prefix": ("diffusion_models", "flux", lambda c, flux: renamed_by_convert(c, flux)),
    "shards": ("diffusion_models", "flux", shards),
    "checkpoint": ("checkpoints", "unet", checkpoint),
    **{
        f"{family} with diffusers' names": ("diffusion_models", family, lambda comfy, base: diffusers(comfy, *base))
        for family in diffusers_names.FAMILIES
    },
    "ControlNet": ("controlnet", None, controlnet),
    "CLIP-L": ("text_encoders", None, clip),
    "Qwen3": ("text_encoders", None, qwen3),
    "T5 XXL": ("text_encoders", None, t5_xxl),
    "VAE": ("vae", None, lambda *_: vae_tool("seedvr2")),
    "MiniMax H3 VAE": ("vae", None, lambda *_: vae_tool("minimax")),
}


TURNS = list(zip([*LIMITS], [*LIMITS][1:] + [*LIMITS][:1], strict=True))
EACH = [
    (kind, storage)
    for number, kind in enumerate(KINDS)
    for storage in (LIMITS if kind == "model" else TURNS[number % len(TURNS)])
]
"""A model in every storage, and each other kind of file in two of them in turn: what a storage is read by does not depend on the kind."""


@pytest.fixture(scope="module")
def made(comfy, models_dir, request):
    """Kind -> its tool, its file, and the result of the file in ComfyUI."""
    known = {}

    def get(kind):
        if kind not in known:
            folder, base, make = KINDS[kind]
            given = (base, models_dir) if "diffusers" in kind else base and request.getfixturevalue(base)
            tool = make(comfy, given)
            source = tool.write(models_dir / folder / f"readers_{len(known)}.safetensors")
            known[kind] = tool, source, (tool.exact or tool.stock)(source)
        return known[kind]

    return get


def is_in(version: str) -> bool:
    """Whether the ComfyUI under test is that version or later."""
    numbers = [[*map(int, each.split("."))] for each in (version, comfyui_version.__version__)]
    return numbers[0] <= numbers[1]


@pytest.mark.parametrize(("kind", "storage"), the_rest_before_a_release(EACH, all_of(KINDS, LIMITS)))
def test_comfyui_alone_reads_what_the_table_says_and_nothing_else(made, kind, storage):
    tool, source, exact = made(kind)
    target = source.with_name(f"{source.stem}_{storage}.safetensors")
    summary = convert_file(source, target, storage, rules_from())
    found = inspect_file(target)
    (reading,) = read_by_of(target)
    assert summary.readers == [reading.text] and reading.text in found.in_comfyui
    try:
        error = relative_error(exact, tool.stock(target))
    except Exception:  # a loader that knows no codes fails in as many ways as it has lines
        error = float("inf")
    ours = relative_error(exact, tool.ours(target)) if tool.ours else None
    print(f"{kind} | {storage} | {reading.since} | {error:.4f} | {ours}")
    if reading.since is not None and is_in(reading.since):
        assert error < LIMITS[storage]
    else:
        assert not error < WRONG
        assert "only Halfsafe" in reading.text or reading.since
    assert ours is None or ours < LIMITS[storage]


def read_by_of(path):
    from halfsafe.precision.files.safetensors_file import open_checkpoint
    from halfsafe.precision.formats.checkpoint import read_checkpoint

    file = open_checkpoint(path)
    read = read_checkpoint(file, file.metadata, path)
    held = {name: FORMAT_OF_STORAGE[it.storage] for name, it in read.weights.items() if not it.plain}
    return read_by(read, held)


@pytest.mark.parametrize("storage", LIMITS)
def test_a_file_quantized_under_diffusers_names_is_read_by_halfsafe_and_after_save_model_or_convert_by_all(
    comfy, flux, models_dir, saved_folder, storage
):
    source, call = flux
    exact = families.replay(families.stock(source), call)
    plain = diffusers_names.write("flux", source, models_dir / "diffusion_models" / "plain_names.safetensors")
    path = diffusers_names.quantize(plain, plain.with_name(f"names_{storage}.safetensors"), storage, "blocks")
    (reading,) = read_by_of(path)
    assert reading.since is None and "only Halfsafe reads them" in reading.text
    try:
        error = relative_error(exact, families.replay(families.stock(path), call))
    except RuntimeError:
        error = float("inf")  # shapes of packed bytes
    assert not error < WRONG
    model = families.load(comfy, path)
    assert relative_error(exact, families.replay(model, call)) < LIMITS[storage]
    saved = saved_models.save(comfy, model, saved_folder)
    convert_file(path, path.with_name(f"converted_{storage}.safetensors"), "as_file", rules_from())
    for written in (saved, path.with_name(f"converted_{storage}.safetensors")):
        assert relative_error(exact, families.replay(families.stock(written), call)) < LIMITS[storage]
        assert [each.kind for each in read_by_of(written)] == [MODEL]


def kind_in(tensors: dict[str, torch.Tensor]):
    """The kind of a file of these tensors, read as any file is."""
    weights = {name: StoredWeight(name, tensor) for name, tensor in tensors.items()}
    read = Checkpoint("", (), {}, weights, [])
    (reading,) = read_by(read, {next(iter(weights)): FORMAT_OF_STORAGE["int8"]})
    return reading.kind


@pytest.mark.parametrize("name", [name for name in tiny_vaes.VAES if name != "pixel_space"])
def test_every_vae_of_comfyui_is_known_as_one(comfy, name):
    kind = kind_in(tiny_vaes.build(name).first_stage_model.state_dict())
    assert kind == (MINIMAX_VAE if name == "minimax" else VAE)


ENCODERS_READ = {
    "gpt_oss",
    "llama",
    "mistral",
    "ministral",
    "gemma2",
    "gemma3",
    "gemma4",
    "qwen2.5",
    "qwen2.5_vl",
    "qwen3",
    "qwen3_8b",
    "ovis",
    "qwen3_vl",
    "qwen3.5",
}


@pytest.mark.parametrize("name", tiny_encoders.ENCODERS)
def test_every_encoder_of_comfyui_is_known_by_whether_it_is_read(comfy, name):
    kind = kind_in(tiny_encoders.build(name).cond_stage_model.tiny.transformer.state_dict())
    assert (kind == LANGUAGE_MODEL) == (name in ENCODERS_READ) and (kind in (CLIP, SMALL_ENCODER)) != (
        name in ENCODERS_READ
    )


@pytest.mark.parametrize("storage", ["int8", "nvfp4"])
@pytest.mark.parametrize("kind", ["model", "sd3 with diffusers' names"])
def test_without_rules_comfyui_still_knows_the_model(made, kind, storage):
    """It tells Flux and SD3 by the widths of layers outside of the blocks, of which packed weights have half."""
    tool, source, exact = made(kind)
    target = source.with_name(f"{source.stem}_{storage}_without_rules.safetensors")
    convert_file(source, target, storage, rules_from("", "none"))
    assert relative_error(exact, tool.stock(target)) < LIMITS[storage]


def test_save_model_without_rules_writes_a_model_that_comfyui_still_knows(comfy, flux, saved_folder):
    source, call = flux
    (rules, _) = comfy.run("HalfsafeLayerRules", rules="", preset="none")
    saved = saved_models.save(comfy, families.load(comfy, source), saved_folder, "nvfp4", rules)
    exact = families.replay(families.stock(source), call)
    assert relative_error(exact, families.replay(families.stock(saved), call)) < LIMITS["nvfp4"]
