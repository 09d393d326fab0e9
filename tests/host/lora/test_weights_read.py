"""What ComfyUI's nodes and other packs read of a quantized model: numbers, or the whole quantized tensor; never codes without their scale."""

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from safetensors.torch import load_file
from support import dialects, families, model_files
from support.guarding import core
from support.measures import relative_error

LAYER, KEPT = "blocks.0.ffn.0", "text_embedding.0"
ERROR = {"bf16": 0.004, "fp8_e4m3fn": 0.06, "mxfp8": 0.06, "int8": 0.03, "w6a8": 0.06, "w4a8": 0.15, "nvfp4": 0.2}
READ_ONLY = ("nvfp4", "mxfp8")


def loaded(comfy, path, storage):
    if storage in READ_ONLY:
        source, path, storage = path, path.with_name(f"{path.stem}-read-{storage}.safetensors"), "as_file"
        if not path.exists():
            model_files.in_dialect(source, path, dialects.in_format, name=path.stem.rpartition("-")[2])
    return families.load(comfy, path, storage, "bf16")


def extracted(model, full: bool) -> dict[str, torch.Tensor]:
    """What ComfyUI's LoraSave writes of one layer."""
    extract, prefix = core("comfy_extras.nodes_lora_extract"), f"diffusion_model.{LAYER}"
    kind = extract.LORAType.FULL_DIFF if full else extract.LORAType.STANDARD
    return extract.calc_lora_model(model, 256, prefix, prefix, {}, kind)


def read(model, key):
    """How a model's weights are read -> the weight ``key``."""
    state = model.model_state_dict()
    yield "model_state_dict", state[key]
    yield "items", dict(model.model_state_dict("diffusion_model.").items())[key]
    yield "values", dict(zip(state, state.values(), strict=True))[key]
    yield "dict", dict(state)[key]
    yield "copies", {**(state | {}).copy()}[key]
    yield "pop", model.model_state_dict().pop(key)
    yield "patch_weight", model.patch_weight_to_device(key, model.load_device, return_weight=True)
    weight, convert = model.get_key_patches()[key][0]
    yield "key_patches", convert(weight)


def error_of(expected, weight):
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.shape == expected.shape
    return relative_error(expected, weight.float()) if plain else float("inf")


@pytest.fixture(scope="module")
def other(wan):
    return families.write_scaled(wan, wan.with_name("weights_read_other.safetensors"), {r"ffn\.0\.weight": 1.5})


@pytest.mark.parametrize("storage", [name for name in ERROR if name in {"bf16"} | held_storages()])
@pytest.mark.parametrize("run", [False, True], ids=["unloaded", "loaded"])
def test_weights_are_read_as_numbers(comfy, wan, other, run, storage):
    subtract = core("comfy_extras.nodes_model_merging").ModelSubtract().merge
    exact, lora = (
        load_file(wan)[f"{LAYER}.weight"].float(),
        model_files.lora({LAYER: (1024, 256), KEPT: (256, 4096)}, size=0.1),
    )
    merged, key, table = exact + model_files.lora_delta(lora, LAYER), f"diffusion_model.{LAYER}.weight", []
    model = loaded(comfy, wan, storage)
    with_lora = load_lora_for_models(model, None, lora, 1.0, 0.0)[0]
    for name, each in (("", model), ("LoRA", with_lora)):
        if run:
            families.denoise(each)
        for how, weight in read(each, key):
            if how == "patch_weight" and name and run and storage == "bf16":
                continue  # ComfyUI's own class, which patches the patched weight again
            expected = merged if name and (how == "patch_weight" or (run and how != "key_patches")) else exact
            table.append((storage, name, how, error_of(expected, weight), ERROR[storage]))
    difference = subtract(loaded(comfy, other, storage), model, 1.0)[0]
    weight = difference.patch_weight_to_device(key, difference.load_device, return_weight=True)
    whole, parts = extracted(difference, full=True), extracted(difference, full=False)
    up, down = (parts[f"diffusion_model.{LAYER}.lora_{part}.weight"].float() for part in ("up", "down"))
    table.append((storage, "subtract", "patch_weight", error_of(exact / 2, weight), 4 * ERROR[storage]))
    table.append(
        (
            storage,
            "subtract",
            "LoraSave in full",
            error_of(exact / 2, whole[f"diffusion_model.{LAYER}.diff"]),
            4 * ERROR[storage],
        )
    )
    table.append((storage, "subtract", "LoraSave", error_of(exact / 2, up @ down), 0.2 + ERROR[storage]))
    lines = [
        f"{storage:12}{name:10}{how:18}{error:10.4f}{'' if error < limit else '  WRONG'}"
        for storage, name, how, error, limit in table
    ]
    assert all(error < limit for *_, error, limit in table), "\n".join(["", *lines])
