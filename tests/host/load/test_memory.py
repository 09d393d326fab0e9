"""Memory that loaded models hold, by the bytes of their tensors: no more than the file where storage is fp8 or int8. What of it is
no slice of the file, whose pages the system drops at need, is what the check before loading counts."""

import itertools

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.precision.base.options import COMPUTE_OPTIONS, STORAGE_OPTIONS
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from halfsafe.precision.plan.layers import why_not_run
from safetensors.torch import load_file, save_file
from support import dialects, families, model_files, tiny_models
from support.mapped_loading import own_bytes
from support.measures import relative_error

QUANTIZED = ("fp8_e4m3fn", "fp8_e5m2", "int8")
CLOSE = 0.03
STORAGES = [storage for storage in STORAGE_OPTIONS if not why_not_run(storage, held_storages())]


@pytest.fixture
def profile(monkeypatch):
    return lambda name: monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", name)


@pytest.fixture
def said(monkeypatch):
    """The bytes each load said it needs, in order."""
    from halfsafe.nodes.host.load import tensors

    asked = []
    monkeypatch.setattr(tensors, "require_memory", lambda needed, what, free: asked.append(needed))
    return asked


def held(module: torch.nn.Module) -> int:
    """The bytes of the storages of a module's tensors, each once."""
    tensors = itertools.chain.from_iterable(map(_inside, itertools.chain(module.parameters(), module.buffers())))
    return sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _inside(tensor):
    if not isinstance(tensor, QuantizedTensor):
        return [tensor]
    beside = (value for value in vars(tensor._params).values() if isinstance(value, torch.Tensor))  # nvfp4 has two
    return [tensor._qdata, *beside]


def size(path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


@pytest.fixture(scope="module")
def small(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "memory_wan.safetensors", blocks=2)


def paired(name: str) -> list[tuple[str, str]]:
    """A device's pairs of storage and compute: each storage once, and over all devices each pair."""
    start = PROFILE_NAMES.index(name)
    return [
        (storage, COMPUTE_OPTIONS[(start + 2 * place) % len(COMPUTE_OPTIONS)]) for place, storage in enumerate(STORAGES)
    ]


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_the_check_before_loading_is_right(comfy, small, profile, said, name):
    profile(name)
    wrong = {}
    for storage, compute in paired(name):
        model = families.load(comfy, small, storage, compute)
        found = own_bytes(model.model.diffusion_model, small)
        if abs(said[-1] / found - 1) > CLOSE:
            wrong[storage, compute] = said[-1], found
    assert wrong == {}


@pytest.mark.parametrize("family", [*tiny_models.FAMILIES])
@pytest.mark.parametrize("storage", ["as_file", "fp8_e4m3fn", "int8"])
def test_it_is_right_for_every_family_in_fp32(comfy, models_dir, profile, said, family, storage):
    path = models_dir / "diffusion_models" / f"narrow_{family}.safetensors"
    if not path.exists():
        families.write_narrow(family, path.parent)
    model = families.load(comfy, path, storage, "fp32")
    found = held(model.model.diffusion_model)
    assert abs(said[-1] / own_bytes(model.model.diffusion_model, path) - 1) < CLOSE
    assert found < size(path) * (1 + CLOSE if storage == "as_file" else 1)


@pytest.mark.parametrize("dialect", [dialects.comfy_quant, dialects.scaled_fp8])
def test_a_partly_quantized_file_takes_what_it_takes_on_the_disk(comfy, wan, models_dir, said, dialect):
    path = model_files.in_dialect(wan, models_dir / "diffusion_models" / "partly.safetensors", dialect)
    model = families.load(comfy, path, "as_file", "fp32")
    found = model.model.diffusion_model
    assert held(found) == pytest.approx(size(path), rel=CLOSE)
    assert said[-1] == pytest.approx(own_bytes(found, path), abs=size(path) / 100) and said[-1] < 0.1 * size(path)


def test_a_file_all_in_fp8_grows_only_where_weights_are_not_linear(comfy, wan, models_dir, said):
    path = models_dir / "diffusion_models" / "all_fp8.safetensors"
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(wan).items()}, path)
    model = families.load(comfy, path, "as_file", "fp32")
    assert own_bytes(model.model.diffusion_model, path) == pytest.approx(said[-1], abs=size(path) / 100)
    assert held(model.model.diffusion_model) < 1.2 * size(path)


def test_weights_kept_from_fp8_compute_as_in_fp32(comfy, wan, call, models_dir):
    """Every layer but one is kept: its fp8 error apart, the model computes what the file's fp32 model computes."""
    from halfsafe.precision.plan.rules import rules_from

    rules = rules_from("* storage=as_file\nblocks.1.ffn.2 storage=fp8_e4m3fn", "none")
    model = families.load(comfy, wan, "fp8_e4m3fn", "fp32", rules)
    layer = model.model.diffusion_model.blocks[1].ffn[2]
    assert isinstance(layer.weight, QuantizedTensor)
    assert model.model.diffusion_model.head.head.weight.dtype == torch.bfloat16
    rounded = {"blocks.1.ffn.2.weight": layer.weight.to(dtype=torch.float32).dequantize()}
    path = models_dir / "diffusion_models" / "rounded.safetensors"
    model_files.changed(
        wan, path, lambda tensors: tensors.update({name: t.float() for name, t in tensors.items()} | rounded)
    )
    expected = families.replay(families.load(comfy, path, "fp32", "fp32"), call)
    assert relative_error(expected, families.replay(model, call)) < 1e-6


@pytest.mark.parametrize("storage", STORAGES)
def test_the_check_before_loading_a_text_encoder_is_right(comfy, models_dir, said, storage):
    path = models_dir / "text_encoders" / "memory_clip_l.safetensors"
    if not path.exists():
        tiny_models.narrow_clip_l(path)
    clip = comfy.run(
        "HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage=storage, compute="auto"
    )[0]
    assert said[-1] == pytest.approx(own_bytes(clip.patcher.model, path), rel=CLOSE)
