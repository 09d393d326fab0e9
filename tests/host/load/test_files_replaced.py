"""ComfyUI keeps what a loader gave for later prompts: a file that was replaced on disk is loaded anew."""

import asyncio
import os
import shutil

import pytest

LOADERS = {
    "HalfsafeLoadDiffusionModel": (
        "diffusion_models",
        {"model_name": "replaced.safetensors", "storage": "auto", "compute": "auto"},
    ),
    "HalfsafeLoadControlNet": ("controlnet", {"control_net_name": "replaced.safetensors"}),
    "HalfsafeLoadVAE": ("vae", {"vae_name": "replaced.safetensors", "dtype": "auto"}),
    "HalfsafeLoadCheckpoint": ("checkpoints", {"ckpt_name": "replaced.safetensors"}),
    "HalfsafeLoadCLIP": ("text_encoders", {"clip_name1": "replaced.safetensors", "clip_name2": "none", "type": "wan"}),
}


@pytest.fixture
def fingerprint(comfy, monkeypatch):
    """What ComfyUI's cache keeps of a prompt's only node, beside its inputs."""
    import execution
    from comfy_execution.graph import DynamicPrompt
    from nodes import NODE_CLASS_MAPPINGS

    def get(kind, inputs):
        monkeypatch.setitem(NODE_CLASS_MAPPINGS, kind, comfy.nodes[kind])
        prompt = DynamicPrompt({"1": {"class_type": kind, "inputs": inputs}})
        return asyncio.run(execution.IsChangedCache("prompt", prompt, None).get("1"))

    return get


@pytest.mark.parametrize("kind", LOADERS)
def test_a_replaced_file_is_seen_and_an_unchanged_one_is_kept(fingerprint, models_dir, wan, kind):
    folder, inputs = LOADERS[kind]
    path = models_dir / folder / "replaced.safetensors"
    shutil.copy(wan, path)
    first = fingerprint(kind, inputs)
    assert first and isinstance(first[0], str) and first == fingerprint(kind, inputs)
    shutil.copy(wan, path)
    os.utime(path, ns=(0, 1))
    assert fingerprint(kind, inputs) != first
    path.unlink()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_file_that_another_node_names_is_no_reason_to_load_anew(fingerprint, kind):
    """ComfyUI gives a fingerprint no inputs that come by a link."""
    (name, _), *others = LOADERS[kind][1].items()
    assert fingerprint(kind, {name: ["2", 0], **dict(others)}) == [""]
