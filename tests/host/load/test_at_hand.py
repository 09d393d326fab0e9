"""The storage of the node *Halfsafe*: a model from any loader is quantized in memory, LoRAs merged, and stays what it was where it came from."""

from __future__ import annotations

import json
import re

import comfy.model_sampling
import pytest
import torch
from comfy import sd
from comfy.lora import calculate_weight
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui.layers import matrix_layers
from halfsafe.nodes.host.comfyui.model_facts import held_bytes, held_storages
from halfsafe.nodes.host.load import at_hand
from halfsafe.nodes.host.load.models import OF_WEIGHTS
from halfsafe.precision.base.errors import HalfsafeError, MemoryShortage, StorageNotHeld
from halfsafe.precision.base.layers import kind_of
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from safetensors.torch import load_file
from support import families, model_files, packed_layers
from support.families import load
from support.int8_models import layers_of
from support.mapped_loading import tensors_of
from support.measures import relative_error

HELD = [name for name in at_hand.STORAGES_AT_HAND[1:] if name in held_storages()]
FAMILIES = ("wan", "sdxl", "flux")


@pytest.fixture(scope="module")
def files(models_dir):
    return families.files_in(models_dir / "diffusion_models", "at_hand")


def halfsafe(comfy, model, storage: str, goal: str = "balanced", **more):
    """(the model that comes out of the node, what it says)."""
    model, _, _, why = comfy.run("HalfsafeAutoPrecision", model=model, goal=goal, storage=storage, guard="off", **more)
    return model, why


def packed(model) -> dict[str, str]:
    """Layer -> its storage, of those whose weight is quantized."""
    return {name: module.weight._layout_cls for name, module in layers_of(model).items()}


def tensors_in(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.model.diffusion_model.state_dict().items()}


def with_lora(model):
    linear = {
        name: tuple(module.weight.shape) for name, module in matrix_layers(model.model) if kind_of(module) == "linear"
    }
    tensors = model_files.lora({name: shape for name, shape in linear.items() if "block" in name}, size=0.05)
    return load_lora_for_models(model, None, tensors, 1.0, 0.0)[0]


def offer(comfy, model, goal: str = "speed", **more) -> dict | None:
    """What the node says beside its report."""
    node = comfy.nodes["HalfsafeAutoPrecision"].PREPARE_CLASS_CLONE(None)
    said = node.execute(model, goal, **{"guard": "off", **more}).ui
    return json.loads(said["halfsafe_result"][0]) if "halfsafe_result" in said else None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_speed_offers_int8_with_the_bytes_that_it_then_takes(
    comfy, files, monkeypatch, family: str, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    stock = families.stock(files(family), dtype)
    told = offer(comfy, stock)
    first, *why = told["messages"][told["sentence"]]["sentences"]
    values = told["messages"][first]["values"]
    assert told["use"] == {"storage": "int8"} and "int8 ran at 1.10 to 2.00 times the speed of 16 bit" in why[0]
    assert told["speed"].startswith("int8: 1.10 to 2.00 times 16 bit's speed (")
    model, _ = halfsafe(comfy, stock, goal="speed", **told["use"])
    for when, held in (("before", stock), ("after", model)):
        size = sum(held_bytes(weight) for weight in held.model.diffusion_model.parameters())
        assert in_bytes(values[when]) == pytest.approx(size, rel=0.02), when
    assert offer(comfy, model) is None and in_bytes(values["after"]) < 0.8 * in_bytes(values["before"])


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


@pytest.mark.parametrize("profile", ["sm_61", "sm_90", "sm_100", "gfx1100", "xpu", "mps_m1", "cpu"])
def test_nothing_is_offered_on_a_device_that_int8_is_not_faster_on(comfy, files, monkeypatch, profile: str) -> None:
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    assert offer(comfy, families.stock(files("wan"), torch.bfloat16)) is None


def test_nothing_is_offered_for_other_goals_or_for_what_storage_does_not_change(
    comfy, files, gguf, monkeypatch
) -> None:
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    stock = families.stock(files("wan"), torch.bfloat16)
    assert offer(comfy, stock)
    assert (
        not any(offer(comfy, stock, goal) for goal in ("balanced", "quality", "memory"))
        and offer(comfy, stock, storage="int8")["use"] is None
    )
    assert offer(comfy, load(comfy, files("wan"), "fp8_e4m3fn", "bf16")) is None and offer(comfy, gguf[0]) is None
    kept = comfy.run("HalfsafeLayerRules", rules="* storage=as_file", preset="none")[0]
    assert offer(comfy, stock, rules=kept) is None, "no layer would be quantized"
    bound = stock.clone()
    bound.model_options["torch_compile_kwargs"] = {}
    assert offer(comfy, bound) is None, "which storage=int8 would refuse"
    monkeypatch.setattr(at_hand, "held_storages", lambda: frozenset({"fp8_e4m3fn"}))
    assert offer(comfy, stock) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("storage", HELD)
def test_a_model_of_comfyuis_loader_is_as_one_that_our_loader_quantized(
    comfy, files, family: str, storage: str
) -> None:
    stock = families.stock(files(family), torch.float32)  # which holds the numbers of any file
    before = tensors_in(stock)
    model, why = halfsafe(comfy, stock, storage)
    ours = load(comfy, files(family), storage, "bf16")
    assert packed(model) == packed(ours) != {} and not packed(stock)
    for name, layer in layers_of(model).items():
        if name in packed(ours):
            assert torch.equal(
                layer.weight._qdata.view(torch.uint8), layers_of(ours)[name].weight._qdata.view(torch.uint8)
            ), name
    after = tensors_in(stock)
    assert all(torch.equal(before[name], after[name]) for name in before), "the model that came in"
    assert f"storage: {len(packed(model))} layers were quantized to {storage}, " in why
    told = [layer["storage"] for layer in families.report(comfy, model)["layers"] if layer["name"] in packed(model)]
    assert {*told} <= {storage, "int8"} and storage in told, "int8: the weight by whose width the model is detected"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lora_is_merged_before_the_weights_are_rounded(comfy, files, family: str) -> None:
    exact = load(comfy, files(family), "fp32")
    call = families.capture(exact, family)
    right = families.replay(with_lora(exact), call)
    model, why = halfsafe(comfy, with_lora(families.stock(files(family), torch.float32)), "int8", goal="quality")
    assert model.patches == {} and "The patches of" in why
    beside = with_lora(load(comfy, files(family), "int8", "fp32"))
    error, limit = (
        relative_error(right, families.replay(model, call)),
        relative_error(right, families.replay(beside, call)),
    )
    assert relative_error(families.replay(exact, call), right) > 5 * error
    assert error < 1.3 * limit, f"{error:.4f}, with the LoRA beside the weights {limit:.4f}"


def test_what_other_nodes_set_on_the_model_is_kept(comfy, files) -> None:
    stock = families.stock(files("sdxl"), torch.bfloat16).clone()
    sampling = comfy_sampling(stock)
    stock.add_object_patch("model_sampling", sampling)
    stock.model_options["transformer_options"]["mark"] = 1
    stock.add_wrapper_with_key("apply_model", "mark", lambda executor, *args, **kwargs: executor(*args, **kwargs))
    stock.set_attachments("mark", "kept")
    model, _ = halfsafe(comfy, stock, "int8")
    assert (
        model.object_patches["model_sampling"] is sampling and model.model_options["transformer_options"]["mark"] == 1
    )
    assert model.wrappers["apply_model"]["mark"] and model.attachments["mark"] == "kept"
    assert packed(model)


def comfy_sampling(model):
    return comfy.model_sampling.ModelSamplingDiscrete(model.model.model_config)


def test_a_model_that_is_quantized_already_is_kept_and_told(comfy, files) -> None:
    fp8 = load(comfy, files("wan"), "fp8_e4m3fn", "bf16")
    model, why = halfsafe(comfy, fp8, "int8")
    assert packed(model) == packed(fp8) and model.model is fp8.model
    assert "storage: storage=int8 changes nothing: the weights are quantized already" in why


def test_a_saved_model_is_the_one_at_hand(comfy, files, tmp_path) -> None:
    import folder_paths

    model, _ = halfsafe(comfy, with_lora(families.stock(files("wan"), torch.bfloat16)), "int8")
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    path = f"{folder_paths.get_output_directory()}/{node.execute(model, 'at_hand', 'as_file', None).args[0]}"
    again = families.stock(path, torch.bfloat16)
    assert packed(again) == packed(model)
    for name in packed(model):
        assert torch.equal(layers_of(again)[name].weight._qdata, layers_of(model)[name].weight._qdata)


def test_as_loaded_is_the_model_that_came_in(comfy, files) -> None:
    stock = families.stock(files("wan"), torch.bfloat16)
    model, why = halfsafe(comfy, stock, "as loaded")
    assert model.model is stock.model and "storage:" not in why


@pytest.mark.parametrize("bound", ["a forward", "compiled", "bypass"])
def test_code_that_would_run_the_old_weights_is_refused_by_name(comfy, files, bound: str) -> None:
    stock = families.stock(files("wan"), torch.bfloat16).clone()
    if bound == "a forward":
        stock.add_object_patch("diffusion_model.blocks.0.ffn.0.forward", lambda x: x)
        named = "diffusion_model.blocks.0.ffn.0.forward"
    elif bound == "compiled":
        stock.model_options["torch_compile_kwargs"] = {}
        named = "torch.compile"
    else:
        stock.set_injections("bypass_lora", [])
        named = "bypass_lora"
    with pytest.raises(HalfsafeError, match=rf"storage cannot be changed here: {named} holds this model's modules"):
        halfsafe(comfy, stock, "int8")


@pytest.mark.skipif("w4a8" in held_storages(), reason="this ComfyUI has it")
def test_a_storage_that_this_comfyui_lacks_is_refused_by_name(comfy, files) -> None:
    with pytest.raises(StorageNotHeld, match="storage=w4a8: this ComfyUI does not run asym_w4a8_int8"):
        halfsafe(comfy, families.stock(files("wan"), torch.bfloat16), "w4a8")


def test_without_room_it_is_refused_before_a_weight_is_made(comfy, files, monkeypatch) -> None:
    monkeypatch.setattr(at_hand, "free_host_memory", lambda: 1 << 10)
    monkeypatch.setattr(at_hand, "made_here", lambda *args: pytest.fail("made"))
    with pytest.raises(MemoryShortage, match=r"storage=int8 needs .* of memory, 1.00 KiB are available"):
        halfsafe(comfy, families.stock(files("wan"), torch.bfloat16), "int8")


def test_a_static_copy_is_quantized_from_the_model_that_came_in(comfy, files) -> None:
    model, _ = halfsafe(comfy, families.stock(files("wan"), torch.bfloat16), "int8")
    factory, arguments = model.cached_patcher_init
    again = factory(*arguments, disable_dynamic=True)
    assert packed(again) == packed(model) and again.model is not model.model


@pytest.mark.parametrize("storage", HELD)
def test_comfyui_counts_the_bytes_of_the_new_model(comfy, files, storage: str) -> None:
    """By them it decides how much of a model to load."""
    stock = families.stock(files("wan"), torch.bfloat16)
    stock.model_size()
    model, _ = halfsafe(comfy, stock, storage)
    held = sum(
        tensor.nbytes for tensor in {each.data_ptr(): each for each in tensors_of(model.model.diffusion_model)}.values()
    )
    assert model.model_size() == pytest.approx(held, rel=0.05) and model.model_size() < 0.75 * stock.model_size()


def test_patched_weights_that_stay_in_16_bit_are_counted_before_a_weight_is_made(comfy, files, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(at_hand, "require_memory", lambda needed, what, free: asked.append(needed))
    stock = families.stock(files("wan"), torch.bfloat16)
    kept = "blocks.0.ffn.0"
    rules = comfy.run("HalfsafeLayerRules", rules=f"{kept} storage=as_file", preset="keep sensitive layers")[0]
    for model in (stock, with_lora(stock)):
        halfsafe(comfy, model, "int8", rules=rules)
    assert asked[1] - asked[0] == stock.get_model_object(f"diffusion_model.{kept}.weight").nbytes


def test_nothing_of_the_old_weights_is_carried_over(comfy, files) -> None:
    """ComfyUI's clone copies what belongs to weights, because its clones have the same ones."""
    stock = families.stock(files("wan"), torch.bfloat16).clone()
    missing = [name for name in OF_WEIGHTS if name not in vars(stock)]
    stock.is_injected = True
    stock.hook_backup["a weight"] = stock.cached_hook_patches["hooks"] = {}
    model, _ = halfsafe(comfy, stock, "int8")
    assert missing == [] and model.hook_backup == {} == model.cached_hook_patches and not model.is_injected
    assert model.clone_base_uuid != stock.clone_base_uuid, "by it ComfyUI unloads a model with its clones"


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_model_is_static_if_that_which_came_in_is(comfy, files, monkeypatch, is_dynamic: bool) -> None:
    stock, made = families.stock(files("wan"), torch.bfloat16), []
    own = sd.load_diffusion_model_state_dict
    monkeypatch.setattr(stock, "is_dynamic", lambda: is_dynamic)
    monkeypatch.setattr(
        sd, "load_diffusion_model_state_dict", lambda *args, **more: made.append(more) or own(*args, **more)
    )
    model, _ = halfsafe(comfy, stock, "int8")
    assert [more["disable_dynamic"] for more in made] == [not is_dynamic] and packed(model)


def test_rules_keep_layers(comfy, files) -> None:
    rules = comfy.run("HalfsafeLayerRules", rules="*ffn* storage=as_file", preset="keep sensitive layers")[0]
    model, _ = halfsafe(comfy, families.stock(files("wan"), torch.bfloat16), "int8", rules=rules)
    assert packed(model) and not any("ffn" in name for name in packed(model))
    assert families.report(comfy, model)["without_effect"] == [], "the node obeyed the rule"


@pytest.fixture
def gguf(files):
    """A model as ComfyUI-GGUF loads it, and the values of its layers."""
    model = families.stock(files("wan"), torch.float32)
    return model, packed_layers.pack(model.model.diffusion_model)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_layers_that_a_gguf_loader_packed_are_asked_for_their_values(comfy, gguf, is_loaded: bool) -> None:
    model, values = gguf
    patched = with_lora(model)
    if is_loaded:  # ComfyUI-GGUF keeps the patches on the tensor then
        for name in values:
            key = f"diffusion_model.{name}.weight"
            module = model.get_model_object(f"diffusion_model.{name}")
            module.weight.patches = [(patched.patches[key], key)]
    quantized, why = halfsafe(comfy, patched, "int8", goal="quality")
    assert f"{len(values)} layers were quantized to int8" in why
    assert re.search(
        rf"{len(values)} layers in \S.* were unpacked, merged .* quantized again, to int8, with an error of 0", why
    ), "the second rounding, and what it costs"
    row = FORMAT_OF_STORAGE["int8"]
    for name, value in values.items():
        key = f"diffusion_model.{name}.weight"
        merged = calculate_weight(patched.patches[key], value.clone(), key)
        made = row.encode(merged, {})
        assert torch.equal(layers_of(quantized)[name].weight._qdata, made["weight"]), name
        assert not is_loaded or model.get_model_object(f"diffusion_model.{name}").weight.patches, "put back"


def test_a_model_that_a_gguf_loader_packed_is_saved_in_16_bit(comfy, gguf) -> None:
    import folder_paths

    model, values = gguf
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    saved = load_file(f"{folder_paths.get_output_directory()}/{node.execute(model, 'gguf', 'as_file', None).args[0]}")
    assert not any("temp" in name for name in saved)
    for name, value in values.items():
        assert saved[f"{name}.weight"].dtype == torch.float16 and torch.equal(saved[f"{name}.weight"], value.half())
        assert f"{name}.bias" in saved
