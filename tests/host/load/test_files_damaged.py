"""Files that are damaged, not a model, or out of bounds: an error that names them, at once, and nothing half-loaded."""

from collections import Counter

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError, MemoryShortage
from halfsafe.precision.files.tensor_file import TensorFile
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import save_file
from support import families, model_files, tiny_models
from support.mapped_loading import mapped_loading

WEIGHT = "blocks.0.ffn.0.weight"


@pytest.fixture(scope="module")
def checkpoint(wan, models_dir):
    """The same model as a full checkpoint holds it."""

    def add_prefix(tensors):
        for name in list(tensors):
            tensors[f"model.diffusion_model.{name}"] = tensors.pop(name)

    return model_files.changed(wan, models_dir / "checkpoints" / "wan-checkpoint.safetensors", add_prefix)


def truncated(wan, path):
    path.write_bytes(wan.read_bytes()[:-1000])


def poisoned(value):
    def write(wan, path):
        model_files.changed(wan, path, lambda tensors: tensors[weight_in(tensors)].view(-1)[35:36].fill_(value))

    return write


def with_scale(leaf, scale):
    def write(wan, path):
        def change(tensors):
            name = weight_in(tensors)
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + leaf] = torch.as_tensor(scale)

        model_files.changed(wan, path, change)

    return write


def weight_in(tensors):
    return next(name for name in tensors if name.endswith(WEIGHT))


def narrowed(wan, path):
    def change(tensors):
        name = weight_in(tensors)
        tensors[name] = tensors[name][:, :240]

    model_files.changed(wan, path, change)


def unknown_architecture(wan, path):
    save_file({"encoder.layer_7.kernel": torch.ones(8, 8), "encoder.layer_7.weight": torch.ones(8, 8)}, path)


def lora(wan, path):
    save_file(model_files.lora({"blocks.0.ffn.0": (1024, 256)}), path)


BAD = {
    "truncated": (truncated, "1000 of .* bytes are missing"),
    "nan": (poisoned(float("nan")), f"{WEIGHT}.*NaN or Inf"),
    "nan_scale": (with_scale("weight_scale", float("nan")), r"blocks\.0\.ffn\.0\.weight_scale.*NaN"),
    "zero_scale": (with_scale("weight_scale", 0.0), r"blocks\.0\.ffn\.0\.weight_scale.*a scale of 0"),
    "lonely_scale": (
        with_scale("weight_scale", torch.ones(7, 3)),
        r"blocks\.0\.ffn\.0\.weight_scale.*does not fit a weight",
    ),
    "strange_scale": (with_scale("blockwise_scale", torch.ones(2)), r"blocks\.0\.ffn\.0\.blockwise_scale"),
    "narrowed": (narrowed, r"tensor 'blocks\.0\.ffn\.0\.weight': of shape 1024x240, but the model has 1024x256"),
    "unknown_architecture": (unknown_architecture, "does not recognise this architecture"),
    "lora": (lora, "LoRA"),
}
IN_A_WEIGHT = {"nan", "narrowed"}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    ("node", "folder"),
    [("HalfsafeLoadDiffusionModel", "diffusion_models"), ("HalfsafeLoadCheckpoint", "checkpoints")],
)
def test_bad_file_is_named_at_once(comfy, wan, checkpoint, models_dir, monkeypatch, name, node, folder):
    write, message = BAD[name]
    path = models_dir / folder / f"bad-{name}.safetensors"
    write(wan if folder == "diffusion_models" else checkpoint, path)
    built = counted_models(monkeypatch)
    taken, take = Counter(), TensorFile.__getitem__
    monkeypatch.setattr(TensorFile, "__getitem__", lambda file, tensor: taken.update([tensor]) or take(file, tensor))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(comfy, node, path.name)
    assert path.name in str(caught.value)
    assert not taken or name != "truncated"
    assert not built or name in IN_A_WEIGHT
    assert set(taken.values()) <= {1, 2, 3}, "to look at its names, to plan, to convert it"


@pytest.mark.parametrize("storage", ["as_file", "int8"])
def test_nan_that_dynamic_vram_leaves_in_the_file_is_named_by_the_guard(comfy, wan, models_dir, storage):
    """A weight that stays a slice of its file is not read at load; the first result that is not finite tells it."""
    path = models_dir / "diffusion_models" / "bad-streamed.safetensors"
    model_files.changed(wan, path, lambda tensors: tensors["head.head.weight"][3, 5:6].fill_(float("nan")))
    with mapped_loading():
        model = families.load(comfy, path, storage, "fp32")
    guarded = comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
    with pytest.raises(NonFinite) as error:
        families.sample(guarded, "wan")
    assert error.value.verdict == "bad_weights"
    assert "head.head.weight" in str(error.value) and path.name in str(error.value)


def counted_models(monkeypatch) -> list:
    """Grows by each model that ComfyUI builds."""
    from comfy.model_base import BaseModel

    built, build = [], BaseModel.__init__

    def counted(self, *args, **options):
        built.append(type(self))
        build(self, *args, **options)

    monkeypatch.setattr(BaseModel, "__init__", counted)
    return built


def load(comfy, node, name, storage="fp8_e4m3fn"):
    if node == "HalfsafeLoadDiffusionModel":
        return comfy.run(node, model_name=name, storage=storage, compute="bf16")
    return comfy.run(node, ckpt_name=name, storage=storage, compute="bf16", clip_storage="auto", vae_dtype="auto")


@pytest.mark.parametrize(
    ("damage", "message"), [(poisoned(float("nan")), "NaN or Inf"), (narrowed, "of shape [0-9]+x240")]
)
@pytest.mark.parametrize("storage", ["as_file", "int8"])
@pytest.mark.parametrize(
    ("node", "folder"),
    [("HalfsafeLoadDiffusionModel", "diffusion_models"), ("HalfsafeLoadCheckpoint", "checkpoints")],
)
def test_the_damaged_part_of_a_model_in_parts_is_named(
    comfy, wan, checkpoint, models_dir, node, folder, storage, damage, message
):
    source = wan if folder == "diffusion_models" else checkpoint
    first, second = model_files.in_parts(source, models_dir / folder, "parts")
    damage(second, second)
    with pytest.raises(CheckpointError, match=f"{second.name}: .*{message}"):
        load(comfy, node, first.name, storage)


@pytest.mark.parametrize("storage", ["as_file", "int8"])
def test_an_encoder_s_weight_that_does_not_fit_is_named(comfy, models_dir, tmp_path, storage):
    def narrow(tensors):
        tensors[name] = tensors[name][:, :704]

    name = "text_model.encoder.layers.5.mlp.fc1.weight"
    path = models_dir / "text_encoders" / "bad-narrow.safetensors"
    model_files.changed(tiny_models.clip_l(tmp_path / "clip.safetensors"), path, narrow)
    with pytest.raises(CheckpointError, match=f"{path.name}: .*{name}': of shape 3072x704, but the model has 3072x768"):
        comfy.run("HalfsafeLoadCLIP", clip_name1=path.name, type="sdxl", storage=storage, compute="auto")


@pytest.mark.parametrize("name", ["truncated", "nan"])
@pytest.mark.parametrize("node", ["HalfsafeLoadCLIP", "HalfsafeLoadVAE"])
def test_bad_encoder_and_vae_are_named(comfy, models_dir, tmp_path, name, node):
    folder = "text_encoders" if node == "HalfsafeLoadCLIP" else "vae"
    good = tmp_path / "good.safetensors"
    save_file({WEIGHT: torch.ones(512, 512), "text_model.encoder.layers.0.mlp.fc1.weight": torch.ones(2, 2)}, good)
    path = models_dir / folder / f"bad-{name}.safetensors"
    BAD[name][0](good, path)
    with pytest.raises(CheckpointError, match=f"{path.name}.*{BAD[name][1]}"):
        run_encoder(comfy, node, path.name)


def run_encoder(comfy, node, name):
    if node == "HalfsafeLoadVAE":
        return comfy.run(node, vae_name=name, dtype="auto")
    return comfy.run(node, clip_name1=name, type="sd3", storage="auto", compute="auto")


@pytest.mark.parametrize("node", ["HalfsafeLoadCLIP", "HalfsafeLoadVAE"])
def test_a_diffusion_model_is_no_encoder_and_no_vae(comfy, models_dir, wan, node):
    folder = "text_encoders" if node == "HalfsafeLoadCLIP" else "vae"
    path = models_dir / folder / "a-diffusion-model.safetensors"
    path.write_bytes(wan.read_bytes())
    with pytest.raises(CheckpointError, match=path.name):
        run_encoder(comfy, node, path.name)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "../../models/secret.safetensors",
        "{}",
        "",
        ".",
        "absent.safetensors",
        "nul\0.safetensors",
    ],
)
def test_paths_outside_the_model_folders_are_refused(comfy, models_dir, wan, name):
    secret = models_dir / "secret.safetensors"
    secret.write_bytes(wan.read_bytes())
    with pytest.raises(CheckpointError, match="no such file"):
        load(comfy, "HalfsafeLoadDiffusionModel", name.format(secret))


def test_too_little_memory_is_refused_before_a_weight_is_read(comfy, models_dir, wan, monkeypatch):
    from halfsafe.nodes.host.load import tensors

    def must_not_run(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(tensors, "free_host_memory", lambda: 1_000_000)
    monkeypatch.setattr(tensors, "made_here", must_not_run)
    with pytest.raises(MemoryShortage, match=r"wan_clean\.safetensors.*needs .* of memory"):
        load(comfy, "HalfsafeLoadDiffusionModel", wan.name)
