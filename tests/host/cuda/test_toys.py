"""What a GPU machine runs while dynamic VRAM is on, before any of it is measured: toys are written whole, and a failure shows its traceback."""

import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import comfy_aimdo.control
import pytest
import torch
from safetensors.torch import load_file
from support import control_files, families, rare_families, tiny_models
from support.inprocess import benchmark, end_of, turn_on_dynamic_vram

TOYS = {
    **{
        name: lambda path, name=name: families.write_narrow(name, path)
        for name in (*tiny_models.FAMILIES, *tiny_models.NARROW)
    },
    **{name: lambda path, name=name: rare_families.write(name, path) for name in rare_families.SMALL},
    **control_files.KINDS,
    **{
        name: getattr(tiny_models, name)
        for name in ("anima", "krea2", "segmind_vega", "sd15_unet", "sd_vae", "wan_vae")
    },
}


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_has_every_tensor_though_comfyui_makes_layers_without_weights(tmp_path, monkeypatch, name):
    written = []
    for module in (tiny_models, rare_families):
        monkeypatch.setattr(module, "write_shapes", lambda path, shapes, *given, **options: written.append(shapes))
    monkeypatch.setattr(
        rare_families,
        "save_file",
        lambda tensors, *given, **options: written.append({key: one.shape for key, one in tensors.items()}),
    )
    for switched in (False, True):
        monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", switched)
        TOYS[name](tmp_path)
    assert written[0] == written[1] and any(key.endswith(".weight") for key in written[0])


def test_a_model_that_a_gpu_draws_has_every_tensor(tmp_path, switched_on):
    def build(operations, **options):
        layers = (
            operations.Linear(8, 4, **options),
            operations.Embedding(3, 4, **options),
            operations.LayerNorm(4, **options),
        )
        return torch.nn.Sequential(*layers), None, {}

    benchmark("gpu_models").write_normal(build, tmp_path / "toy.safetensors", "cpu")
    tensors = load_file(tmp_path / "toy.safetensors")
    assert tensors.keys() == {"0.weight", "0.bias", "1.weight", "2.weight", "2.bias"}
    assert all(one.dtype == torch.float16 and one.isfinite().all() for one in tensors.values())
    assert tensors["0.weight"].any() and not tensors["0.bias"].any()


def test_comfy_aimdo_logs_as_main_py_has_it(monkeypatch, switched_on):
    """Its own level is every line, an allocation each."""
    levels = []
    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.CoreModelPatcher)
    monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(comfy_aimdo.control, "init_devices", lambda devices: bool([*devices]))
    for name in ("debug", "info", "warning"):
        monkeypatch.setattr(comfy_aimdo.control, f"set_log_{name}", lambda name=name: levels.append(name))
    assert turn_on_dynamic_vram() and levels == ["warning"]


def test_a_failure_is_shown_behind_what_comfy_aimdo_logged():
    logged = "aimdo: /project/src/vbar.c:41:DEBUG:vbar_fault: offset=0k, size=2048k\n" * 200
    assert (
        end_of(f"{logged}Traceback (most recent call last):\n{logged}RuntimeError: mat1 and mat2\n{logged}")
        == "Traceback (most recent call last):\nRuntimeError: mat1 and mat2"
    )
