"""Data that are numbers and mean none, in the file of each loader: whole numbers without a format, and zeros where matrices were."""

import functools
import re

import pytest
import torch
from halfsafe.nodes.host.load.controlnet import load_control_net, loaded_control
from halfsafe.nodes.host.load.encoders import load_text_encoder, load_vae
from halfsafe.nodes.host.load.files import output_path
from halfsafe.nodes.host.load.models import load_diffusion_model
from halfsafe.precision.base.errors import CheckpointError, HalfsafeError
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file
from support import control_files, model_files, tiny_models

ZEROS = "matrices in a row hold only zeros, from byte"
NO_RULES = rules_from()


def diffusion_model(path):
    return load_diffusion_model(str(path), "as_file", "fp32", NO_RULES).attachments["halfsafe"].notes


def encoder(path):
    return load_text_encoder([str(path)], "stable_diffusion", "auto", "auto").patcher.attachments["halfsafe"].notes


def control(path):
    return loaded_control(load_control_net(str(path), "as_file", "fp32", NO_RULES)).record.notes


LOADERS = {
    "diffusion model": (tiny_models.wan, diffusion_model),
    "checkpoint": (
        functools.partial(tiny_models.sd15_checkpoint, layers=2),
        lambda path: (
            load_diffusion_model(str(path), "as_file", "fp32", NO_RULES, whole=True).attachments["halfsafe"].notes
        ),
    ),
    "text encoder": (tiny_models.clip_l, encoder),
    "VAE": (tiny_models.sd_vae, lambda path: load_vae(str(path), "auto") and ()),
    "ControlNet": (control_files.sd15, control),
}


@pytest.fixture(scope="module", params=LOADERS)
def loader(comfy, request, tmp_path_factory):
    write, load = LOADERS[request.param]
    return write(tmp_path_factory.mktemp("meaning") / "model.safetensors"), load


def test_a_matrix_of_whole_numbers_is_refused_by_name(loader, tmp_path):
    path, load = loader
    name = next(name for name, tensor in load_file(path).items() if tensor.dim() > 1 and name.endswith("weight"))
    whole = model_files.changed(
        path,
        tmp_path / "whole.safetensors",
        lambda tensors: tensors.update({name: (tensors[name].float() * 20).to(torch.int8)}),
    )
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}': in int8, and nothing in the file says"):
        load(whole)


def test_zeros_where_matrices_were_are_told(loader, tmp_path, caplog):
    path, load = loader
    caplog.set_level("INFO", "halfsafe")
    assert ZEROS not in " ".join(load(path)) and ZEROS not in caplog.text
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    (target := tmp_path / "interrupted.safetensors").write_bytes(data)
    notes = " ".join(load(target))
    assert ZEROS in caplog.text and (ZEROS in notes or load is LOADERS["VAE"][1])


def test_a_name_that_no_file_can_have_is_refused(comfy):
    with pytest.raises(HalfsafeError, match="NUL"):
        output_path("diffusion_models/a\0b")
