"""What a saved file is read as: metadata and marks that ComfyUI's detection reads travel with the weights."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.formats.checkpoint import CARD_KEY
from halfsafe.precision.plan.rules import rules_from
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import families, model_files, rare_families, tiny_models
from support.measures import relative_error

LTX = {
    "timestep_scale_multiplier": 500,
    "positional_embedding_max_pos": [10, 512, 512],
    "causal_temporal_positioning": True,
}
CONFIGS = {
    "ltxv": (tiny_models.ltxv, LTX),
    "ltxav": (
        partial(rare_families.write, "ltxav"),
        {**rare_families.SMALL["ltxav"], **LTX, "av_ca_timestep_scale_multiplier": 7.0},
    ),
    "wan": (tiny_models.wan, {"eps": 0.5}),
    "minimax_h3": (partial(rare_families.write, "minimax_h3"), {"sigma_shift_audio": 5.0, "qk_norm_eps": 0.1}),
}
FAMILIES = list(CONFIGS)


@pytest.fixture(scope="module")
def output(comfy):
    import folder_paths

    folder = Path(folder_paths.get_output_directory()) / "diffusion_models"
    folder_paths.add_model_folder_path("diffusion_models", str(folder))
    return folder.parent


@pytest.fixture(scope="module")
def configured(models_dir):
    """family -> a file with a ``config`` in its metadata that changes what the model computes, and one without."""
    made = {}

    def get(family):
        if family not in made:
            build, config = CONFIGS[family]
            folder = models_dir / "diffusion_models"
            bare = build(folder / f"bare_{family}.safetensors")
            metadata = {
                "config": json.dumps({"transformer": config, "vae": {"a": 1}}),
                "workflow": "old",
                "author": "me",
            }
            metadata |= {"modelspec.hash_sha256": "0x0", "modelspec.title": "A model"}
            made[family] = (
                bare,
                model_files.changed(bare, folder / f"configured_{family}.safetensors", lambda _: None, metadata),
            )
        return made[family]

    return get


def load(comfy, path, origin="ours", storage="as_file"):
    if origin == "ours":
        return families.load(comfy, path, storage, "fp32")
    return comfy.core["UNETLoader"]().load_unet(path.name, "default")[0]


def save(comfy, model, output, storage="as_file"):
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    return output / node.execute(model, "diffusion_models/identity", storage, None).args[0]


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def described(model):
    config = model.model.model_config
    return type(config), {key: value for key, value in config.unet_config.items() if key != "dtype"}


def in_fp32(model):
    model.set_model_compute_dtype(torch.float32)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("origin", "storage"), [("ours", "int8"), ("stock", "as_file")])
def test_a_saved_model_is_the_same_model(comfy, configured, output, family, origin, storage):
    _, path = configured(family)
    model = load(comfy, path, origin)
    saved = save(comfy, model.clone(), output, storage)
    assert described(load(comfy, saved, "stock")) == described(model)
    assert json.loads(metadata(saved)["config"]) == json.loads(metadata(path)["config"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_file_is_the_same_model(comfy, configured, models_dir, family):
    _, path = configured(family)
    target = models_dir / "diffusion_models" / f"converted_{family}.safetensors"
    convert_file(path, target, "fp8_e4m3fn", rules_from())
    assert described(load(comfy, target, "stock")) == described(load(comfy, path))


@pytest.mark.parametrize("family", ["ltxv", "wan"])
def test_stock_loader_computes_the_same_with_a_saved_file(comfy, configured, output, family):
    bare, path = configured(family)
    model = load(comfy, path)
    call = families.capture(model, family)
    expected = families.replay(model, call)
    saved = save(comfy, model, output)
    assert relative_error(expected, families.replay(in_fp32(load(comfy, saved, "stock")), call)) < 1e-5
    assert not torch.allclose(families.replay(in_fp32(load(comfy, bare, "stock")), call), expected, rtol=1e-3)


def test_a_model_of_a_checkpoint_keeps_its_config(comfy, configured, models_dir, output):
    _, path = configured("ltxv")
    whole = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(whole, models_dir / "checkpoints" / "ltxv.safetensors", metadata(path))
    model = comfy.run(
        "HalfsafeLoadCheckpoint",
        ckpt_name="ltxv.safetensors",
        storage="as_file",
        compute="fp32",
        clip_storage="auto",
        vae_dtype="auto",
    )[0]
    assert described(load(comfy, save(comfy, model, output), "stock")) == described(load(comfy, path, "stock"))


def test_texts_that_no_longer_hold_stay_behind(comfy, configured, output):
    _, path = configured("wan")
    kept = metadata(save(comfy, load(comfy, path), output))
    assert kept.keys() == {"format", "config", "author", "modelspec.title", CARD_KEY}


def test_a_model_of_playground_keeps_its_latents_and_its_sampling(comfy, models_dir, output):
    from comfy.latent_formats import SDXL_Playground_2_5

    folder = models_dir / "diffusion_models"
    marks = {"edm_mean": torch.zeros(1), "edm_std": torch.ones(1)}
    source = tiny_models.sdxl(folder / "sdxl_plain.safetensors")
    path = model_files.changed(source, folder / "playground.safetensors", lambda tensors: tensors.update(marks))
    model = load(comfy, path)
    again = load(comfy, save(comfy, model, output), "stock").model
    assert again.model_type == model.model.model_type
    assert isinstance(again.latent_format, SDXL_Playground_2_5)
