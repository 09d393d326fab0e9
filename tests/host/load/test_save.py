"""Saved models: stock ComfyUI computes the very same with them, LoRAs are merged, and a failure leaves no file."""

import pytest
import torch
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.formats.card import card_in
from halfsafe.precision.formats.checkpoint import CARD_KEY
from halfsafe.precision.plan.rules import rules_from
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import model_files, tiny_models
from support.families import denoise
from support.measures import relative_error
from support.saved_models import KEPT, LAYER, load, save, stock, with_lora


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize("stored", ["as_file", "auto", "same"])
def test_stock_loader_computes_with_the_same_bits(comfy, wan, saved_folder, storage, stored):
    model = load(comfy, wan.name, storage, "bf16")
    path = save(comfy, model, saved_folder, storage if stored == "same" else stored)
    theirs = stock(comfy, path, torch.bfloat16)
    results = [denoise(one) for one in (model, theirs)]
    ours, core = ([bits(part) for part in one.model.diffusion_model.parameters()] for one in (model, theirs))
    assert all(
        torch.equal(*pair) for own, other in zip(ours, core, strict=True) for pair in zip(own, other, strict=True)
    )
    assert relative_error(*results) < 2**-8, (
        "weights elsewhere in memory may be summed in another order, and a sum then rounded otherwise"
    )


def bits(weight):
    """What a weight is computed with in bf16: itself, or the codes and scale of a quantized one."""
    return [weight._qdata.view(torch.uint8), weight._params.scale] if hasattr(weight, "_qdata") else [weight.bfloat16()]


def test_file_is_small_and_in_core_s_format(comfy, wan, saved_folder):
    path = save(comfy, load(comfy, wan.name, "as_file", "bf16"), saved_folder, "fp8_e4m3fn")
    tensors = load_file(path)
    assert tensors[f"{LAYER}.weight"].dtype == torch.float8_e4m3fn
    assert bytes(tensors[f"{LAYER}.comfy_quant"].tolist()) == b'{"format": "float8_e4m3fn"}'
    assert tensors[f"{LAYER}.weight_scale"].shape == ()
    assert tensors[f"{KEPT}.weight"].dtype == torch.bfloat16
    assert set(load_file(wan)) <= set(tensors)


def test_bf16_and_rules(comfy, wan, saved_folder):
    model = load(comfy, wan.name, "as_file", "bf16")
    rules = rules_from(f"{LAYER} storage=fp8_e5m2\nblocks.1.* storage=fp16", "none")
    tensors = load_file(save(comfy, model, saved_folder, "bf16", rules))
    assert tensors[f"{LAYER}.weight"].dtype == torch.float8_e5m2
    assert tensors["blocks.1.ffn.0.weight"].dtype == torch.float16
    assert tensors["blocks.0.ffn.2.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors["blocks.0.ffn.2.weight"], load_file(wan)["blocks.0.ffn.2.weight"])


def merged(wan, lora_file, layer, strength=1.0):
    return load_file(wan)[f"{layer}.weight"].float() + strength * model_files.lora_delta(load_file(lora_file), layer)


@pytest.mark.parametrize("applied", [False, True], ids=["unloaded", "patched in place"])
@pytest.mark.parametrize("origin", ["ours", "stock"])
def test_lora_is_merged(comfy, wan, lora_file, saved_folder, applied, origin):
    base = load(comfy, wan.name, "as_file", "fp32") if origin == "ours" else stock(comfy, wan)
    model = with_lora(comfy, base, lora_file, 0.5)
    if applied:
        denoise(model)
    tensors = load_file(save(comfy, model, saved_folder, "fp32", rules_from("", "none")))
    for layer in (LAYER, KEPT):
        assert relative_error(merged(wan, lora_file, layer, 0.5), tensors[f"{layer}.weight"]) < 1e-5
    untouched = tensors["blocks.1.ffn.0.weight"]
    assert torch.equal(untouched, load_file(wan)["blocks.1.ffn.0.weight"].float())


@pytest.mark.parametrize("applied", [False, True], ids=["unloaded", "patched in place"])
def test_lora_on_fp8_is_merged_before_quantizing(comfy, wan, lora_file, saved_folder, applied):
    model = with_lora(comfy, load(comfy, wan.name), lora_file)
    if applied:
        denoise(model)
    tensors = load_file(save(comfy, model, saved_folder, "fp8_e4m3fn"))
    weight = tensors[f"{LAYER}.weight"].float() * tensors[f"{LAYER}.weight_scale"]
    assert relative_error(merged(wan, lora_file, LAYER), weight) < 0.04
    assert relative_error(merged(wan, lora_file, KEPT), tensors[f"{KEPT}.weight"].float()) < 0.003


def test_saving_changes_nothing_in_the_model(comfy, wan, lora_file, saved_folder):
    model = with_lora(comfy, load(comfy, wan.name), lora_file)
    before = denoise(model)
    save(comfy, model, saved_folder, "fp8_e5m2")
    assert torch.equal(denoise(model), before)


def test_bypass_lora_is_refused_not_dropped(comfy, wan, lora_file, saved_folder):
    import comfy.sd

    sd = load_file(lora_file)
    model, _ = comfy.sd.load_bypass_lora_for_models(stock_model(wan), None, sd, 1.0, 0.0)
    before = set(saved_folder.glob("*"))
    with pytest.raises(HalfsafeError, match="bypass LoRA"):
        run_saver(model)
    assert set(saved_folder.glob("*")) == before


def stock_model(path):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path))


def run_saver(model):
    from halfsafe.nodes.host.load.save import save_model

    return save_model(model, "diffusion_models/saved", "as_file", rules_from(), None, None).name


def test_v_prediction_is_kept(comfy, models_dir, saved_folder):
    from comfy.model_base import ModelType

    folder = models_dir / "diffusion_models"
    source = tiny_models.sdxl(folder / "sdxl.safetensors")
    marks = {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
    marked = model_files.changed(source, folder / "sdxl-v.safetensors", lambda tensors: tensors.update(marks))
    saved = save(comfy, load(comfy, marked.name, "fp8_e4m3fn", "fp32"), saved_folder)
    assert set(marks) <= set(load_file(saved))
    reloaded = stock(comfy, saved).model
    assert reloaded.model_type == ModelType.V_PREDICTION
    assert reloaded.model_sampling.zsnr


def test_workflow_is_in_the_metadata(comfy, wan, saved_folder):
    from halfsafe.nodes.host.load.save import save_model

    name = save_model(
        load(comfy, wan.name), "diffusion_models/saved", "as_file", rules_from(), {"1": {}}, {"workflow": {"a": 1}}
    ).name
    with safe_open(saved_folder.parent / name, "pt") as file:
        assert {**file.metadata(), CARD_KEY: ""} == {
            CARD_KEY: "",
            "format": "pt",
            "prompt": '{"1": {}}',
            "workflow": '{"a": 1}',
        }


def test_the_card_tells_of_source_and_loras_and_changes_no_detection(comfy, wan, lora_file, saved_folder):
    model = with_lora(comfy, load(comfy, wan.name, "as_file", "bf16"), lora_file)
    path = save(comfy, model, saved_folder, "fp8_e4m3fn")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    card = card_in(metadata)
    assert (
        card["source"]["file"] == wan.name
        and card["source"]["bytes"] == wan.stat().st_size
        and card["merged_patches"] == 2
    )
    assert card["asked_storage"] == "fp8_e4m3fn" and card["needs_comfyui"] == "0.4.0"
    bare = saved_folder / "without_card.safetensors"
    save_file(load_file(path), bare, {name: text for name, text in metadata.items() if name != CARD_KEY})
    with_card, without = stock(comfy, path), stock(comfy, bare)
    assert with_card.model.model_config.unet_config == without.model.model_config.unet_config
    assert relative_error(denoise(without), denoise(with_card)) < 1e-5


def test_names_count_up_and_stay_in_the_output_folder(comfy, wan, saved_folder):
    model = load(comfy, wan.name)
    first, second = (save(comfy, model, saved_folder) for _ in range(2))
    assert first != second
    assert first.is_file() and second.is_file()
    with pytest.raises(Exception, match=r"(?i)outside|output"):
        save(comfy, model, saved_folder, prefix="../../escaped")


def test_nan_in_a_lora_is_named(comfy, wan, saved_folder, models_dir):
    tensors = model_files.lora({LAYER: (1024, 256)})
    tensors[f"diffusion_model.{LAYER}.lora_B.weight"][0, 0] = float("nan")
    path = models_dir / "loras" / "nan-lora.safetensors"
    save_file(tensors, path)
    before = set(saved_folder.glob("*"))
    with pytest.raises(HalfsafeError, match=f"{LAYER}.weight.*NaN"):
        save(comfy, with_lora(comfy, load(comfy, wan.name), path), saved_folder)
    assert set(saved_folder.glob("*")) == before


def test_a_compiled_block_is_saved_under_the_names_of_its_layers(comfy, wan, lora_file, saved_folder):
    """Other packs put the compiled block in the place of the block, where it stays while the model is loaded."""
    model = with_lora(comfy, load(comfy, wan.name, "as_file", "bf16"), lora_file)
    expected = load_file(save(comfy, model, saved_folder))
    other = model.clone()
    other.add_object_patch(
        "diffusion_model.blocks.0", torch.compile(model.model.diffusion_model.blocks[0], backend="eager")
    )
    denoise(other)
    assert any("_orig_mod" in name for name in model.model.diffusion_model.state_dict())
    found = load_file(save(comfy, model, saved_folder))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
