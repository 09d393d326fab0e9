"""Sharded sets whose index leaves a part out, whose endings are in capitals, and files that are cut while they are read."""

import json
import os
import sys

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.files.safetensors_file import open_checkpoint
from safetensors.torch import save_file


def parts(folder, count=3, suffix=".safetensors"):
    names = [f"model-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        save_file({f"layer.{number}.weight": torch.full((2, 2), float(number))}, folder / name)
    return names


def index(folder, names, suffix=".safetensors"):
    path = folder / f"model{suffix}.index.json"
    path.write_text(json.dumps({"weight_map": {f"layer.{int(name[6:11]) - 1}.weight": name for name in names}}))
    return path


def test_a_part_that_its_index_leaves_out_is_told(tmp_path):
    names = parts(tmp_path)
    path = index(tmp_path, names[:2])
    for opened in (tmp_path / names[2], tmp_path / names[0], path):
        with pytest.raises(CheckpointError, match=rf"index\.json: leaves out {names[2]}.*Download the index again"):
            open_checkpoint(opened)


def test_a_part_of_another_set_than_its_index_describes_is_told(tmp_path):
    names = parts(tmp_path)
    save_file({"other.weight": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    index(tmp_path, names)
    with pytest.raises(CheckpointError, match=r"leaves out model-00001-of-00002\.safetensors"):
        open_checkpoint(tmp_path / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("ending", [None, ".SAFETENSORS", ".safetensors"])
def test_parts_with_an_ending_in_capitals_are_one_model(tmp_path, ending):
    names = parts(tmp_path, suffix=".SAFETENSORS")
    if ending:
        index(tmp_path, names, ending)
    assert len(open_checkpoint(tmp_path / names[1])) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cuts no file that is mapped")
def test_a_file_that_was_cut_since_it_was_opened_is_told_and_not_read(tmp_path):
    save_file({"a": torch.ones(100_000), "b": torch.ones(100_000)}, tmp_path / "a.safetensors")
    file = open_checkpoint(tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", 500_000)
    for use in (lambda: file["b"].sum(), file.require_whole):
        with pytest.raises(CheckpointError, match=r"a\.safetensors: cut to 500000 bytes while it was read"):
            use()
