"""Data that are numbers and mean none, in the file of each loader: whole numbers without a format, and zeros where matrices were."""

import functools
import re

import pytest
import torch
from halfsafe.nodes.host.load.controlnet import LoadedControl, load_control_net
from halfsafe.nodes.host.load.encoders import load_text_encoder, load_vae
from halfsafe.nodes.host.load.files import output_path
from halfsafe.nodes.host.load.models import load_diffusion_model
from halfsafe.nodes.host.reporting.badge import BADGE_KEY, control_ui, encoder_ui, model_ui
from halfsafe.precision.base.errors import CheckpointError, HalfsafeError
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import SCALES_ELSEWHERE, WITHOUT_SCALES
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file
from support import control_files, model_files, tiny_models

ZEROS = "hold only zeros"
NO_RULES = rules_from()


def diffusion_model(path, whole=False):
    return load_diffusion_model(str(path), "as_file", "fp32", NO_RULES, whole=whole)


def encoder(path):
    return load_text_encoder([str(path)], "stable_diffusion", "auto", "auto")


def control(path):
    return load_control_net(str(path), "as_file", "fp32", NO_RULES)


LOADERS = {
    "diffusion model": (tiny_models.wan, diffusion_model, model_ui),
    "checkpoint": (
        functools.partial(tiny_models.sd15_checkpoint, layers=2),
        functools.partial(diffusion_model, whole=True),
        model_ui,
    ),
    "text encoder": (tiny_models.clip_l, encoder, encoder_ui),
    "VAE": (tiny_models.sd_vae, lambda path: load_vae(str(path), "auto"), encoder_ui),
    "ControlNet": (control_files.sd15, control, control_ui),
}


@pytest.fixture(scope="module", params=LOADERS)
def loader(comfy, request, tmp_path_factory):
    write, load, ui = LOADERS[request.param]
    return write(tmp_path_factory.mktemp("meaning") / "model.safetensors"), load, ui


def test_a_matrix_of_whole_numbers_is_refused_by_name(loader, tmp_path):
    path, load, _ = loader
    name = next(name for name, tensor in load_file(path).items() if tensor.dim() > 1 and name.endswith("weight"))
    whole = model_files.changed(
        path,
        tmp_path / "whole.safetensors",
        lambda tensors: tensors.update({name: (tensors[name].float() * 20).to(torch.int8)}),
    )
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}': in int8, and nothing in the file says"):
        load(whole)


def test_zeros_where_matrices_were_are_told(loader, tmp_path, caplog):
    path, load, _ = loader
    caplog.set_level("INFO", "halfsafe")
    assert ZEROS not in notes_of(load(path)) and ZEROS not in caplog.text
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    (target := tmp_path / "interrupted.safetensors").write_bytes(data)
    assert ZEROS in notes_of(load(target)) and ZEROS in caplog.text


def test_a_hole_inside_of_a_matrix_is_told_by_its_bytes(loader, tmp_path, caplog):
    path, load, _ = loader
    entries = open_checkpoint(path).entries.items()
    name, entry = max(entries, key=lambda item: (len(item[1].shape) > 1) * (item[1].end - item[1].start))
    size = entry.end - entry.start
    first, last = entry.start + size // 5 + 99, entry.end - size // 7 - 99
    assert last - first > 1 << 16, "long enough to be told"
    data = bytearray(path.read_bytes())
    data[first - 1], data[last + 1] = 1, 1
    data[first : last + 1] = bytes(last + 1 - first)
    (target := tmp_path / "interrupted.safetensors").write_bytes(data)
    expected = f"bytes {first} to {last} of {target.name} {ZEROS} (1 tensors, from {name} to {name})"
    caplog.set_level("INFO", "halfsafe")
    assert expected in notes_of(load(target)) and expected in caplog.text


def test_fp8_that_lacks_its_scales_is_told_by_note_and_badge(loader, tmp_path, caplog):
    path, load, ui = loader

    def changed(divide):
        def change(tensors):
            for name, tensor in tensors.items():
                if tensor.dim() > 1 and name.endswith("weight"):
                    values = tensor.float() + 1e-3
                    values = values / values.abs().max() * 448 if divide else values
                    tensors[name] = values.to(torch.float8_e4m3fn)

        return model_files.changed(path, tmp_path / "fp8.safetensors", change)

    caplog.set_level("INFO", "halfsafe")
    plain = load(changed(False))
    assert SCALES_ELSEWHERE not in notes_of(plain) and WITHOUT_SCALES not in ui(plain)[BADGE_KEY][0]
    told = load(changed(True))
    assert SCALES_ELSEWHERE in notes_of(told) and SCALES_ELSEWHERE in caplog.text
    assert WITHOUT_SCALES in ui(told)[BADGE_KEY][0]


def notes_of(loaded):
    """The notes in the record of a model, a text encoder, a VAE or a ControlNet."""
    if hasattr(loaded, "control_model"):
        return " ".join(LoadedControl.of(loaded).record.notes)
    return " ".join(getattr(loaded, "patcher", loaded).attachments["halfsafe"].notes)


def test_a_name_that_no_file_can_have_is_refused(comfy):
    with pytest.raises(HalfsafeError, match="NUL"):
        output_path("diffusion_models/a\0b")
