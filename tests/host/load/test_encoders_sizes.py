"""CLIPs of other sizes than the usual ones in full checkpoints: as many positions, layers and channels as the file has."""

import pytest
import torch
from halfsafe.nodes.host.load.encoders import load_checkpoint_text_encoder
from safetensors.torch import load_file, save_file
from support import families, tiny_models
from support.measures import relative_error

TEXT = "a lighthouse in a storm, " * 30


def conditioning(clip, text=TEXT):
    return clip.encode_from_tokens(clip.tokenize(text), return_pooled=True)


def narrow_clip(width: int, layers: int, positions: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A CLIP-L of these sizes, by the names of its own file."""
    shapes = tiny_models.clip_l_shapes(width, layers)
    shapes["text_model.embeddings.position_embedding.weight"] = (positions, width)
    return dict(tiny_models.tensors_of_shapes(shapes, torch.float16, seed))


def in_checkpoint(models_dir, name: str, encoder: dict[str, torch.Tensor]):
    """The encoder in a full checkpoint of SD 1.5, and in a file of its own."""
    unet = load_file(tiny_models.sd15_unet(models_dir / "diffusion_models" / "unet_of_sizes.safetensors"))
    tensors = {f"model.diffusion_model.{key}": tensor for key, tensor in unet.items()}
    tensors |= {f"cond_stage_model.transformer.{key}": tensor for key, tensor in encoder.items()}
    save_file(tensors, models_dir / "checkpoints" / f"{name}.safetensors")
    save_file(encoder, models_dir / "text_encoders" / f"{name}.safetensors")
    return f"{name}.safetensors"


@pytest.mark.parametrize("positions", [77, 248])
@pytest.mark.parametrize(("width", "layers"), [(768, 2), (256, 3)])
def test_a_clip_in_a_checkpoint_is_that_of_its_own_file(comfy, models_dir, positions, width, layers):
    name = in_checkpoint(models_dir, f"sizes_{positions}_{width}", narrow_clip(width, layers, positions))
    auto = {"storage": "auto", "compute": "auto", "clip_storage": "auto", "vae_dtype": "auto"}
    clip = comfy.run("HalfsafeLoadCheckpoint", ckpt_name=name, **auto)[1]
    alone = comfy.run("HalfsafeLoadCLIP", clip_name1=name, type="stable_diffusion", storage="auto", compute="auto")[0]
    for wanted, found in zip(conditioning(alone), conditioning(clip), strict=True):
        assert wanted.shape == found.shape and relative_error(wanted, found) < 1e-6
    assert conditioning(clip)[0].shape[1] % positions == 0


def test_both_clips_of_an_sdxl_checkpoint_have_the_file_s_sizes(comfy, models_dir):
    path = tiny_models.narrow_sdxl(models_dir / "diffusion_models" / "sdxl_of_sizes.safetensors", shallow=True)
    parts = {
        "conditioner.embedders.0.transformer.": narrow_clip(256, 4, 248),
        "conditioner.embedders.1.model.transformer.": narrow_clip(128, 3, 248, seed=1),
    }
    tensors = {f"model.diffusion_model.{key}": tensor for key, tensor in load_file(path).items()}
    tensors |= {prefix + key: tensor for prefix, clip in parts.items() for key, tensor in clip.items()}
    tensors["conditioner.embedders.1.model.text_projection"] = torch.eye(128).half()
    save_file(tensors, models_dir / "checkpoints" / "sdxl_of_sizes.safetensors", families.metadata_of(path))
    clip = load_checkpoint_text_encoder(str(models_dir / "checkpoints" / "sdxl_of_sizes.safetensors"), "auto")
    encoders = clip.cond_stage_model
    assert [len(each.transformer.text_model.encoder.layers) for each in (encoders.clip_l, encoders.clip_g)] == [4, 3]
    found, pooled = conditioning(clip)
    assert found.shape[1:] == (248, 256 + 128) and found.isfinite().all() and pooled.shape == (1, 128)
