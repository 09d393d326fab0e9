"""The policy of a governed ComfyUI (`app/governance.py`, after 0.39): each file that a loader of ours reads is asked about, as ComfyUI's own loaders ask."""

from types import SimpleNamespace

import pytest
import torch
from halfsafe.nodes.host.load import files
from halfsafe.precision.base.errors import CheckpointError
from safetensors.torch import save_file

LOADERS = {
    "HalfsafeLoadDiffusionModel": ("diffusion_models", {"model_name": "{}", "storage": "as_file", "compute": "auto"}),
    "HalfsafeLoadCheckpoint": (
        "checkpoints",
        {"ckpt_name": "{}", "storage": "as_file", "compute": "auto", "clip_storage": "auto", "vae_dtype": "auto"},
    ),
    "HalfsafeLoadVAE": ("vae", {"vae_name": "{}", "dtype": "auto"}),
    "HalfsafeLoadCLIP": ("text_encoders", {"clip_name1": "{}", "type": "sd3", "storage": "auto", "compute": "auto"}),
    "HalfsafeLoadControlNet": ("controlnet", {"control_net_name": "{}", "storage": "as_file", "compute": "auto"}),
}


@pytest.fixture
def refused(monkeypatch):
    """The files that a stand-in of the policy was asked about; it permits those with `permitted` in their names."""
    asked = []

    def model_allowed(path):
        asked.append(path)
        return "permitted" in path

    monkeypatch.setattr(files, "governance", SimpleNamespace(model_allowed=model_allowed))
    return asked


@pytest.mark.parametrize("node", LOADERS)
def test_every_loader_asks_before_it_reads_weights(comfy, models_dir, refused, node):
    folder, values = LOADERS[node]
    path = models_dir / folder / f"policy-{folder}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({"a.weight": torch.ones(4, 4)}, path)
    with pytest.raises(CheckpointError, match=r"policy-.*: not permitted by the policy"):
        comfy.run(node, **{name: value.format(path.name) for name, value in values.items()})
    assert refused == [str(path)]


def test_each_shard_is_asked_about(comfy, tmp_path, refused):
    for number, name in enumerate(("a", "b"), 1):
        save_file({f"{name}.weight": torch.ones(4, 4)}, tmp_path / f"permitted-{number:05d}-of-00002.safetensors")
    assert set(files.open_model(str(tmp_path / "permitted-00001-of-00002.safetensors")).weights) == {
        "a.weight",
        "b.weight",
    }
    assert len(refused) == 2
