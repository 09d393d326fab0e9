"""What a model is saved in: its quantized numbers, or a sentence on those that are rounded again; the dtypes of its file."""

import json
import re
from pathlib import Path

import pytest
import torch
from halfsafe.nodes.host.comfyui.model_facts import held_bytes
from halfsafe.nodes.host.load import save as host
from safetensors.torch import load_file
from support import dialects, diffusers_names, families, int8_models, model_files, tiny_models
from support.measures import relative_error
from support.saved_models import KEPT, LAYER

NODE = "HalfsafeSaveModel"


@pytest.fixture(scope="module")
def fp16(models_dir):
    """A file in fp16 but for a norm in fp32, which ComfyUI holds in fp32 on a CPU."""
    path = tiny_models.wan(models_dir / "diffusion_models" / "save_fp16.safetensors", torch.float16)
    return model_files.changed(path, path, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))


NORM = "blocks.0.norm3.weight"


def stored(comfy, model, storage: str):
    """The model that the node Halfsafe makes, and its result on the page."""
    node = comfy.nodes["HalfsafeAutoPrecision"].PREPARE_CLASS_CLONE(None)
    output = node.execute(model, "balanced", storage=storage, guard="off")
    return output.args[0], result_of(output)


def result_of(output) -> dict:
    return json.loads(output.ui["halfsafe_result"][0])


def save(comfy, model, folder, storage=None, **more):
    """(the tensors of the file, what is told) of Save Model; without a storage, as it is put in."""
    node = comfy.nodes[NODE].PREPARE_CLASS_CLONE(None)
    default = next(given.default for given in node.define_schema().inputs if given.id == "storage")
    output = node.execute(model, "diffusion_models/as_stored", storage or default, **more)
    return load_file(folder.parent / output.args[0]), result_of(output)


def dtypes_of(tensors) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def with_lora(model, size=0.1):
    from comfy.sd import load_lora_for_models

    tensors = model_files.lora({LAYER: (1024, 256), KEPT: (256, 4096)}, size=size)
    return load_lora_for_models(model, None, tensors, 1.0, 0.0)[0]


def test_as_it_is_put_in_it_keeps_the_numbers_that_the_node_made(comfy, fp16, saved_folder):
    model, _ = stored(comfy, families.stock(fp16), "int8")
    tensors, told = save(comfy, model, saved_folder)
    held = int8_models.layers_of(model)[LAYER].weight
    assert torch.equal(tensors[f"{LAYER}.weight"], held._qdata) and "again" not in told["sentence"]


WRITERS = {"int8": int8_models.int8, "fp8_e4m3fn": dialects.comfy_quant}


@pytest.fixture(scope="module")
def quantized(fp16):
    """Storage -> the model's file in it."""
    return {
        storage: model_files.in_dialect(fp16, fp16.with_name(f"save_in_{storage}.safetensors"), write)
        for storage, write in WRITERS.items()
    }


WAYS = ("Save Model", "loader", "convert")


def way(comfy, how: str, path: Path, storage: str, folder: Path, tmp_path: Path) -> tuple[str, torch.Tensor]:
    """What is told of a file in 8 bits that is brought to a storage, and the numbers of a layer that come of it."""
    from halfsafe.precision.commands.convert import convert_file
    from halfsafe.precision.formats.checkpoint import read_checkpoint
    from halfsafe.precision.plan.rules import rules_from

    if how == "loader":
        node = comfy.nodes["HalfsafeLoadDiffusionModel"].PREPARE_CLASS_CLONE(None)
        output = node.execute(path.name, storage, "auto")
        told = result_of(output)["sentence"] if "halfsafe_result" in output.ui else ""
        return told, output.args[0].get_model_object(f"diffusion_model.{LAYER}.weight").dequantize().float()
    if how == "convert":
        summary = convert_file(path, tmp_path / "converted.safetensors", storage, rules_from())
        told, tensors = " ".join(summary.text().split()), load_file(tmp_path / "converted.safetensors")
    else:
        tensors, result = save(comfy, families.load(comfy, path, "as_file", "auto"), folder, storage, card=False)
        told = result["sentence"]
    return told, read_checkpoint(tensors, None, "").weights[f"{LAYER}.weight"].dequantize(torch.float32)


@pytest.mark.parametrize("how", WAYS)
def test_numbers_are_never_rounded_again_without_a_word(comfy, quantized, saved_folder, tmp_path, how):
    from halfsafe.precision.formats.checkpoint import read_checkpoint

    for before, after in (
        ("int8", "fp8_e4m3fn"),
        ("fp8_e4m3fn", "int8"),
        ("int8", "int8"),
        ("fp8_e4m3fn", "fp8_e4m3fn"),
    ):
        path = quantized[before]
        own = read_checkpoint(load_file(path), None, "").weights[f"{LAYER}.weight"].dequantize(torch.float32)
        told, made = way(comfy, how, path, after, saved_folder, tmp_path)
        error = relative_error(own, made)
        said = f"layers in {before} were quantized again, to {after}, with an error of "
        assert (said in told) == (error > 4e-3) == (before != after), (before, after, told, error)
        if said in told:
            figure = float(told.partition(said)[2].partition(" ")[0].rstrip("%.")) / 100
            assert (
                figure == pytest.approx(error, rel=0.25)
                and "blocks.0." in told
                and "as_file or as loaded does not round" in told
            )


@pytest.mark.parametrize("storage", WRITERS)
def test_a_lora_on_8_bit_weights_is_said_to_round_them_again(comfy, quantized, saved_folder, storage):
    model = with_lora(families.load(comfy, quantized[storage], "as_file", "auto"))
    _, told = save(comfy, model, saved_folder)
    assert (
        f"1 layers in {storage} were unpacked, merged with their patches and quantized again, to {storage}, "
        in told["sentence"]
    )
    assert LAYER in told["sentence"] and told["tone"] == "good"
    _, told = save(comfy, with_lora(families.load(comfy, quantized[storage], "bf16", "auto")), saved_folder)
    assert "again" not in told["sentence"]


def test_what_is_not_quantized_has_the_dtype_of_its_file(comfy, fp16, saved_folder):
    """Whatever ComfyUI widened it to, and whatever was merged into it."""
    in_file = dtypes_of(load_file(fp16))
    held = dtypes_of(families.stock(fp16).model.diffusion_model.state_dict())
    assert {*held.values()} == {torch.float32} and {*in_file.values()} == {torch.float16, torch.float32}
    patched = with_lora(families.stock(fp16))
    for model in (families.stock(fp16), patched, families.load(comfy, fp16, "fp32", "fp32")):
        tensors, _ = save(comfy, model, saved_folder)
        assert dtypes_of(tensors) == in_file
    for storage in ("int8", "fp8_e4m3fn"):
        tensors, told = save(comfy, patched, saved_folder, storage)
        left = {name: dtype for name, dtype in dtypes_of(tensors).items() if name in in_file and dtype.itemsize > 1}
        assert (
            f"{KEPT}.weight" in left
            and left == {name: in_file[name] for name in left}
            and "no less" not in told["sentence"]
        )


def test_a_checkpoints_model_has_the_dtypes_of_its_part_of_the_file(comfy, models_dir, saved_folder):
    from comfy.sd import load_checkpoint_guess_config

    path = tiny_models.narrow_sd15_checkpoint(models_dir / "checkpoints" / "save_parts.safetensors")
    model = load_checkpoint_guess_config(
        str(path), output_vae=False, output_clip=False, model_options={"dtype": torch.float32}
    )[0]
    assert {*dtypes_of(model.model.diffusion_model.state_dict()).values()} == {torch.float32}
    assert {*dtypes_of(save(comfy, model, saved_folder)[0]).values()} == {torch.float16}


def test_names_of_another_tool_are_followed_to_their_dtypes(comfy, models_dir, saved_folder):
    """Also where ComfyUI fuses tensors, and where a file has two dtypes."""
    own = families.write_narrow("flux", models_dir / "diffusion_models")
    path = diffusers_names.write("flux", own, own.with_name("save_names_flux.safetensors"))
    kept = []

    def widen(tensors):
        kept.extend(name for name, tensor in tensors.items() if tensor.dim() == 1)
        tensors.update({name: tensors[name].float() for name in kept})

    model_files.changed(path, path, widen)
    tensors, _ = save(comfy, families.stock(path, torch.float32), saved_folder)
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert wide == {name for name, tensor in tensors.items() if tensor.dim() == 1} and kept


def test_values_that_the_files_dtype_cannot_hold_are_not_cut(comfy, fp16, saved_folder):
    tensors, _ = save(comfy, with_lora(families.stock(fp16), size=1e6), saved_folder)
    assert tensors[f"{LAYER}.weight"].dtype == torch.bfloat16 and tensors[f"{LAYER}.weight"].isfinite().all()


def test_a_file_that_is_not_known_leaves_what_is_held(comfy, fp16, saved_folder):
    model = families.stock(fp16)
    model.cached_patcher_init = None
    tensors, told = save(comfy, model, saved_folder, "int8")
    assert tensors[NORM].dtype == torch.float32 and "no less" not in told["sentence"]


@pytest.mark.parametrize("way", ["from 16 bits", "from 8 bits", "by a rule"])
def test_a_file_that_is_larger_than_the_models_says_so_first(comfy, fp16, quantized, saved_folder, way):
    """Whatever it was made larger by; with both sizes."""
    from halfsafe.precision.plan.rules import rules_from

    path = fp16 if way in ("from 16 bits", "by a rule") else quantized["int8"]
    storage = {"from 16 bits": "fp32", "from 8 bits": "bf16"}.get(way, "as_file")
    loaded = families.load(comfy, path, "as_file", "auto")
    rules = rules_from("* storage=fp32") if way == "by a rule" else None
    _, told = save(comfy, loaded, saved_folder, storage, rules=rules)
    first = told["sentence"].partition(": ")[0]
    assert first.startswith("Saved diffusion_models/") and first.endswith("larger than the model's file was"), told
    assert told["tone"] == "good"
    for storage in ("as_file", "int8"):
        _, told = save(comfy, families.stock(fp16), saved_folder, storage)
        assert "larger" not in told["sentence"], storage


def test_quantized_again_is_told_second_with_its_error(comfy, quantized, saved_folder):
    """Where the page shows it, whichever storage was chosen: before the list of formats."""
    for model in (
        families.load(comfy, quantized["int8"], "as_file", "auto"),
        with_lora(families.load(comfy, quantized["int8"], "as_file", "auto")),
    ):
        _, told = save(comfy, model, saved_folder, "fp8_e4m3fn")
        _, second, *_ = re.split(r"(?<=\.)\s+(?=[A-Z0-9])", told["sentence"])
        assert re.search(r"again, to fp8_e4m3fn, with an error of \d", second), told["sentence"]


def test_a_file_that_is_no_smaller_is_said_to_be(comfy, fp16, saved_folder, monkeypatch):
    monkeypatch.setattr(host.LiveWeights, "keep_storage", lambda *args: "as_file")
    _, told = save(comfy, families.stock(fp16), saved_folder, "int8")
    assert "no less than in the model's file (" in told["sentence"]


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_the_node_says_what_a_loader_says_and_holds_what_a_loader_holds(comfy, fp16, storage):
    model, told = stored(comfy, families.stock(fp16), storage)
    node = comfy.nodes["HalfsafeLoadDiffusionModel"].PREPARE_CLASS_CLONE(None)
    output = node.execute(fp16.name, storage, "fp32")
    loaded = result_of(output)
    assert told["sentence"] == loaded["sentence"].replace(fp16.name, told["sentence"].partition(":")[0])
    assert told["tone"] == loaded["tone"] == "good" and told["toast"]
    sizes = [
        sum(held_bytes(weight) for weight in one.model.diffusion_model.parameters()) for one in (model, output.args[0])
    ]
    assert sizes[0] == sizes[1] < 0.9 * fp16.stat().st_size


def test_a_storage_that_changes_nothing_is_told_where_the_bytes_would_be(comfy, quantized):
    _, told = stored(comfy, families.load(comfy, quantized["int8"], "as_file", "auto"), "fp8_e4m3fn")
    assert (
        told["tone"] == "warn"
        and told["sentence"] == "storage=fp8_e4m3fn changes nothing: the weights are quantized already"
    )


def test_a_storage_that_the_device_unpacks_is_told_with_the_bytes(comfy, fp16, monkeypatch):
    from halfsafe.nodes.host.comfyui.model_facts import held_storages

    if "nvfp4" not in held_storages():
        pytest.skip("this ComfyUI has no nvfp4")
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    _, told = stored(comfy, families.stock(fp16), "nvfp4")
    assert "layers in nvfp4 are dequantized in each call" in told["sentence"] and " -> " in told["sentence"]
