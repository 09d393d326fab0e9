"""A saved model that LoRAs or merges changed: each layer in the format that it has in the model, with the changed weights."""

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from safetensors.torch import load_file
from support import dialects, families, model_files
from support.guarding import core
from support.measures import relative_error
from support.saved_models import save

LAYER, KEPT = "blocks.0.ffn.0", "text_embedding.0"
ERROR = {
    "bf16": 0.004,
    "fp16": 0.001,
    "fp8_e4m3fn": 0.04,
    "mxfp8": 0.06,
    "int8": 0.02,
    "w6a8": 0.04,
    "w4a8": 0.12,
    "nvfp4": 0.15,
}
"""How far a saved weight may be from the exact one: the rounding of its format, in which the file was before."""
STORAGES = [name for name in ERROR if name in {"bf16", "fp16"} | held_storages()]
READ_ONLY = ("nvfp4", "mxfp8")


@pytest.fixture(scope="module")
def other(wan):
    factors = {r"ffn\.0\.weight": 1.5, r"text_embedding\.0\.weight": 1.3, r"ffn\.0\.bias": 1.2}
    return families.write_scaled(wan, wan.with_name("save_patched_other.safetensors"), factors)


def loaded(comfy, path, storage):
    if storage in READ_ONLY:
        path = model_files.in_dialect(
            path, path.with_name(f"{path.stem}-{storage}.safetensors"), dialects.in_format, name=storage
        )
        storage = "as_file"
    return families.load(comfy, path, storage, "bf16")


def changes(comfy, wan, other, storage):
    """What is done to a model -> the model, and how two exact files are added up."""
    lora = model_files.lora({LAYER: (1024, 256), KEPT: (256, 4096)}, size=0.1)
    merging, second = core("comfy_extras.nodes_model_merging"), loaded(comfy, other, storage)
    blocks = core("comfy_extras.nodes_model_merging").ModelMergeBlocks()

    def exact(first, share):
        return lambda layer: (
            first * load_file(wan)[f"{layer}.weight"].float() + share * load_file(other)[f"{layer}.weight"].float()
        )

    yield (
        "LoRA",
        lambda model: load_lora_for_models(model, None, lora, 1.0, 0.0)[0],
        lambda layer: exact(1, 0)(layer) + model_files.lora_delta(lora, layer),
    )
    yield "merge", lambda model: merging.ModelMergeSimple().merge(model, second, 0.6)[0], exact(0.6, 0.4)
    yield "add", lambda model: merging.ModelAdd().merge(model, second)[0], exact(1, 1)
    yield (
        "blocks",
        lambda model: blocks.merge(model, second, **{"blocks.": 0.3, "text_embedding": 0.3})[0],
        exact(0.3, 0.7),
    )


@pytest.mark.parametrize(
    "storage",
    [pytest.param(name, marks=pytest.mark.release) if name in ("fp16", "mxfp8") else name for name in STORAGES],
)
def test_each_layer_is_saved_in_its_own_format(comfy, wan, other, saved_folder, storage):
    """Every other change is saved after a run, which puts it into the weights; in fp8 what a LoRA changed is saved, and in each storage what any did."""
    wrong, table = 0, ["", f"{'change':8}{'asked':12}{'size':>8}{'error':>9}{'kept':>9}"]
    sizes = {}
    for asked in ("as_file", "fp8_e4m3fn"):
        sizes[asked] = save(comfy, loaded(comfy, wan, storage), saved_folder, asked).stat().st_size
    for place, (change, changed, exact) in enumerate(changes(comfy, wan, other, storage)):
        model = changed(loaded(comfy, wan, storage))
        if (STORAGES.index(storage) + place) % 2:
            families.denoise(model)
        for asked, size in sizes.items():
            if asked != "as_file" and change != "LoRA":
                continue
            path = save(comfy, model, saved_folder, asked)
            file = open_checkpoint(path)
            weights = read_checkpoint(dict(file.items()), file.metadata, path).weights
            errors = [
                relative_error(exact(layer), weights[f"{layer}.weight"].dequantize(torch.float32))
                for layer in (LAYER, KEPT)
            ]
            larger = path.stat().st_size / size
            kept = weights[f"{KEPT}.weight"].storage
            limits = [ERROR[storage] + ERROR.get(asked, 0), ERROR[storage] if kept == storage else ERROR["bf16"]]
            good = abs(larger - 1) < 0.01 and all(error < limit for error, limit in zip(errors, limits, strict=True))
            wrong += not good
            table.append(
                f"{change:8}{asked:12}{larger:8.3f}{errors[0]:9.4f}{errors[1]:9.4f}{'' if good else '  WRONG'}"
            )
    assert not wrong, "\n".join(table)


def test_the_node_tells_the_formats_that_it_wrote(comfy, wan, other, saved_folder):
    merge = core("comfy_extras.nodes_model_merging").ModelMergeSimple().merge
    model = merge(families.load(comfy, wan, "int8", "bf16"), families.load(comfy, other, "int8", "bf16"), 0.6)[0]
    told = (
        comfy.nodes["HalfsafeSaveModel"]
        .PREPARE_CLASS_CLONE(None)
        .execute(model, "diffusion_models/saved", "as_file", None)
        .ui
    )
    assert all(part in str(told) for part in ("int8", "bf16")), told


@pytest.mark.parametrize("format", ["fp8_e4m3fn", "int8", "mxfp8"])
def test_full_precision_of_a_layer_outlives_a_lora(comfy, wan, saved_folder, format):
    settings = {"full_precision_matrix_mult": True}
    path = wan.with_name(f"save_patched_full_{format}.safetensors")
    if format == "fp8_e4m3fn":
        model_files.in_dialect(wan, path, dialects.comfy_quant, settings=settings)
    else:
        more = {"convrot": True, "convrot_groupsize": 256} if format == "int8" else {}
        name = {"int8": "int8_tensorwise"}.get(format, format)
        model_files.in_dialect(wan, path, dialects.in_format, name=format, settings={"format": name} | more | settings)
    model = load_lora_for_models(
        families.load(comfy, path, "as_file", "bf16"), None, model_files.lora({LAYER: (1024, 256)}), 1.0, 0.0
    )[0]
    file = open_checkpoint(save(comfy, model, saved_folder, "as_file"))
    weights = read_checkpoint(file, file.metadata, path).weights
    assert all(weights[f"{layer}.weight"].full_precision for layer in model_files.WAN_LINEARS)
    assert {weights[f"{layer}.weight"].storage for layer in model_files.WAN_LINEARS} == {format}
