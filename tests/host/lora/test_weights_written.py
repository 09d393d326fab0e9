"""What ComfyUI's nodes merge, save and train of quantized models and encoders: right numbers, each layer in its own format."""

from collections.abc import Callable, Iterator
from pathlib import Path

import comfy.hooks
import folder_paths
import pytest
import torch
from comfy.model_patcher import MemoryCounter
from comfy.ops import mixed_precision_ops
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from safetensors.torch import load_file, save_file
from support import dialects, families, model_files, tiny_models
from support.guarding import core
from support.measures import relative_error

LAYER, KEPT, SAME = "blocks.0.self_attn.q", "text_embedding.0", "blocks.1.ffn.2"
"""A layer that is quantized, one that is kept high, and a quantized one that both models have alike."""
FC1, FC2 = (f"text_model.encoder.layers.1.mlp.{name}" for name in ("fc1", "fc2"))
ERROR = {"bf16": 0.004, "fp16": 0.002, "fp8_e4m3fn": 0.05, "mxfp8": 0.05, "int8": 0.015, "nvfp4": 0.13}
"""How far a weight may be from the exact one after one rounding to its format, and after a LoRA or merge another."""
BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3fn": 1, "mxfp8": 1 + 1 / 32, "int8": 1, "nvfp4": 0.5 + 1 / 16}
READ_ONLY = ("nvfp4", "mxfp8")
ENCODERS = ("bf16", pytest.param("fp8_e4m3fn", marks=pytest.mark.release), "int8")
Change = tuple[str, Callable, Callable[[str], torch.Tensor], float]


def storages() -> list[str]:
    return [name for name in ERROR if name in {"bf16", "fp16"} | held_storages()]


@pytest.fixture(scope="module")
def files(wan):
    """Two exact models that differ in some layers."""
    return wan, families.write_scaled(
        wan, wan.with_name("weights_written.safetensors"), {rf"{LAYER}\.weight": 1.5, rf"{KEPT}\.weight": 1.3}
    )


def loaded(comfy, path: Path, storage: str):
    if storage not in READ_ONLY:
        return families.load(comfy, path, storage, "bf16")
    target = path.with_name(f"{path.stem}_{storage}_written.safetensors")
    if not target.exists():
        model_files.in_dialect(path, target, dialects.in_format, name=storage)
    return families.load(comfy, target, "as_file", "bf16")


def written(node: str, *inputs) -> Path:
    """The file that one of ComfyUI's nodes for saving writes."""
    folder = Path(folder_paths.get_output_directory()) / "written"
    before = set(folder.glob("*"))
    saver = core("comfy_extras.nodes_model_merging").NODE_CLASS_MAPPINGS[node]
    getattr(saver(), saver.FUNCTION)(*inputs, "written/file")
    (path,) = set(folder.glob("*")) - before
    return path


def read(path: Path) -> dict:
    file = open_checkpoint(path)
    return read_checkpoint(dict(file.items()), file.metadata, str(path)).weights


def bytes_of(module: torch.nn.Module, storage: str) -> float:
    """How large the formats say that a model is."""

    def size(tensor: torch.Tensor) -> float:
        if not isinstance(tensor, QuantizedTensor):
            return tensor.numel() * tensor.element_size()
        return tensor.numel() * BYTES[storage] + (4 * len(tensor) if storage == "int8" else 0)

    return sum(map(size, module.parameters()))


def changes(first: dict, second: dict, other) -> Iterator[Change]:
    """What is done to a model, its function, the exact result, and how many times its rounding the error may be."""
    lora = model_files.lora({LAYER: (256, 256), KEPT: (256, 4096)}, size=0.1)
    merging = core("comfy_extras.nodes_model_merging").NODE_CLASS_MAPPINGS

    def sum_of(one: float, two: float, strength: float = 0.0):
        def exact(layer: str) -> torch.Tensor:
            weights = one * first[f"{layer}.weight"].float() + two * second[f"{layer}.weight"].float()
            return weights + strength * model_files.lora_delta(lora, layer) if layer in (LAYER, KEPT) else weights

        return exact

    def hooked(model):
        model, hooks = model.clone(), comfy.hooks.create_hook_lora(lora=lora, strength_model=1.0, strength_clip=0.0)
        hooks.set_keyframes_on_hooks(comfy.hooks.HookKeyframeGroup())
        model.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model))
        return model

    def merged(node, *options, **shares):
        return lambda model: merging[node]().merge(model, other, *options, **shares)[0]

    shares = {"blocks.": 0.3, "text_embedding": 0.3}
    yield "as it is", lambda model: model, sum_of(1, 0), 1
    yield "LoRA", lambda model: load_lora_for_models(model, None, lora, 1.0, 0.0)[0], sum_of(1, 0, 1), 1.5
    yield "subtract", merged("ModelMergeSubtract", 1.0), sum_of(1, -1), 6
    yield "add", merged("ModelMergeAdd"), sum_of(1, 1), 1.5
    yield "simple", merged("ModelMergeSimple", 0.6), sum_of(0.6, 0.4), 1.5
    yield "blocks", core_blocks(other, shares), sum_of(0.3, 0.7), 1.5
    yield "hooks", hooked, sum_of(1, 0), 1


def core_blocks(other, shares: dict[str, float]) -> Callable:
    blocks = core("comfy_extras.nodes_model_merging").ModelMergeBlocks()
    return lambda model: blocks.merge(model, other, **shares)[0]


@pytest.mark.parametrize(
    "storage",
    [pytest.param(name, marks=pytest.mark.release) if name in ("fp16", "mxfp8") else name for name in storages()],
)
def test_a_model_is_saved_as_it_was_changed(comfy, files, storage):
    (model, other), (first, second) = (loaded(comfy, path, storage) for path in files), map(load_file, files)
    wrong, table = 0, []
    size = bytes_of(model.model.diffusion_model, storage)
    for name, change, exact, times in changes(first, second, other):
        changed = change(model)
        for run in ("unloaded", "loaded"):
            finite = run == "unloaded" or families.denoise(changed).isfinite().all()
            path = written("ModelSave", changed)
            weights = {key.removeprefix("model.diffusion_model."): weight for key, weight in read(path).items()}
            saved = {layer: weights[f"{layer}.weight"] for layer in (LAYER, KEPT, SAME)}
            assert saved[KEPT].storage in ("bf16", "fp16")
            limits = {layer: times * ERROR[weight.storage] for layer, weight in saved.items()}
            errors = {
                layer: relative_error(exact(layer), weight.dequantize(torch.float32))
                for layer, weight in saved.items()
                if exact(layer).any()
            }
            zeros = all(
                not weight.dequantize(torch.float32).any() for layer, weight in saved.items() if layer not in errors
            )
            larger = path.stat().st_size / size
            good = (
                finite
                and zeros
                and abs(larger - 1) < 0.01
                and all(error < limits[layer] for layer, error in errors.items())
            )
            wrong += not good
            shown = "".join(f"{errors.get(layer, 0):9.4f}" for layer in (LAYER, KEPT, SAME))
            table.append(f"{storage:12}{name:10}{run:10}{larger:8.4f}{shown}{'' if good else '  WRONG'}")
    assert not wrong, "\n".join(["", *table])


def trained(model, bypass: bool) -> tuple[dict[str, torch.Tensor], float]:
    """The LoRA of ComfyUI's TrainLoraNode after two steps, and its last loss."""
    inputs = {
        "batch_size": 1, "steps": 2, "grad_accumulation_steps": 1, "learning_rate": 1e-3, "rank": 2, "optimizer": "SGD", "loss_function": "MSE", "seed": 1,
        "training_dtype": "bf16", "lora_dtype": "fp32", "quantized_backward": False, "algorithm": "LoRA", "gradient_checkpointing": False, "checkpoint_depth": 1,
        "offloading": False, "existing_lora": "[None]", "bucket_mode": False, "bypass_mode": bypass,
    }  # fmt: skip
    latents = {"samples": families.noise(model, seed=3)}
    torch.manual_seed(5)
    made = core("comfy_extras.nodes_train").TrainLoraNode.execute(
        [model], [latents], [families.conditioning("wan")], **{name: [value] for name, value in inputs.items()}
    )
    return made.args[0], made.args[1]["loss"][-1]


@pytest.fixture(scope="module", params=[False, True], ids=["in weights", "bypass"])
def of_core(request, wan):
    """(whether it is bypass_mode, what ComfyUI trains on the exact model, its loss)"""
    return request.param, *trained(families.stock(wan), request.param)


@pytest.mark.parametrize("storage", storages())
def test_a_lora_is_trained_on_a_quantized_model(comfy, wan, of_core, storage):
    bypass, exact, loss = of_core
    down = [name for name in exact if "lora_down" in name]
    nodes = core("comfy_extras.nodes_train")
    model = loaded(comfy, wan, storage)
    lora, own_loss = trained(model, bypass)
    error = relative_error(
        torch.cat([exact[name].flatten() for name in down]), torch.cat([lora[name].flatten() for name in down])
    )
    assert error < 0.01 + 1.5 * ERROR[storage], (storage, error)
    assert abs(own_loss - loss) < 0.01 * loss, (storage, own_loss, loss)
    plain, with_lora = (
        families.denoise(model),
        families.denoise(nodes.LoraModelLoader.execute(model, lora, 1.0, bypass).args[0]),
    )
    assert with_lora.isfinite().all() and not torch.equal(with_lora, plain), storage


ENCODER_CHANGES = {
    "as it is": (1, 0, 0),
    "LoRA": (1, 0, 1),
    "subtract": (1, -1, 0),
    "add": (1, 1, 0),
    "simple": (0.6, 0.4, 0),
}
"""Share of the first encoder, of the second, and strength of a LoRA."""


@pytest.mark.parametrize("storage", ENCODERS)
def test_an_encoder_a_vae_and_a_checkpoint_are_saved(comfy, wan, models_dir, storage):
    first = tiny_models.narrow_clip_l(models_dir / "text_encoders" / f"clip_l_written_{storage}.safetensors")
    second = families.write_scaled(
        first, first.with_name(f"clip_l_other_{storage}.safetensors"), {rf"{FC1}\.weight": 1.5}
    )
    clip, other = (
        comfy.run("HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage=storage, compute="auto")[0]
        for path in (first, second)
    )
    made = model_files.lora({FC1: (1024, 256)}, size=0.05)
    lora = {name.replace("diffusion_model.", "text_encoders.clip_l.transformer."): part for name, part in made.items()}
    merging, one, two = (
        core("comfy_extras.nodes_model_merging").NODE_CLASS_MAPPINGS,
        load_file(first),
        load_file(second),
    )
    changed = {
        "as it is": clip, "LoRA": load_lora_for_models(None, clip, lora, 0.0, 1.0)[1], "subtract": merging["CLIPMergeSubtract"]().merge(clip, other, 1.0)[0],
        "add": merging["CLIPMergeAdd"]().merge(clip, other)[0], "simple": merging["CLIPMergeSimple"]().merge(clip, other, 0.6)[0],
    }  # fmt: skip

    def check(weights: dict, prefix: str, name: str) -> None:
        of_one, of_two, strength = ENCODER_CHANGES[name]
        for layer in (FC1, FC2):
            expected = of_one * one[f"{layer}.weight"].float() + of_two * two[f"{layer}.weight"].float()
            expected = expected + strength * model_files.lora_delta(made, FC1) if layer == FC1 else expected
            weight = weights[f"{prefix}{layer}.weight"].dequantize(torch.float32)
            error = relative_error(expected, weight) if expected.any() else weight.abs().max()
            assert error < (6 if name == "subtract" else 1.5) * ERROR[storage], (name, layer, error)

    size = bytes_of(clip.cond_stage_model, storage)
    for name, each in changed.items():
        path = written("CLIPSave", each)
        assert abs(path.stat().st_size / size - 1) < 0.01, (name, path.stat().st_size / size)
        check(read(path), "", name)
    whole = core("comfy_extras.nodes_lora_extract")
    output = whole.calc_lora_model(
        changed["subtract"].patcher, 8, "", "text_encoders.", {}, whole.LORAType.FULL_DIFF, bias_diff=False
    )
    assert (
        relative_error(
            (one[f"{FC1}.weight"] - two[f"{FC1}.weight"]).float(),
            output[f"text_encoders.clip_l.transformer.{FC1}.diff"].float(),
        )
        < 6 * ERROR[storage]
    )
    vae_file = tiny_models.wan_vae(models_dir / "vae" / "wan_vae_written.safetensors")
    vae = comfy.run("HalfsafeLoadVAE", vae_name=vae_file.name, dtype="bf16")[0]
    exact = load_file(vae_file)
    path = written("VAESave", vae)
    assert abs(path.stat().st_size / (2 * sum(tensor.numel() for tensor in exact.values())) - 1) < 0.01
    assert all(
        relative_error(exact[key], tensor.float()) < 0.004
        for key, tensor in load_file(path).items()
        if exact[key].any()
    )
    model = loaded(comfy, wan, storage)
    path = written("CheckpointSave", model, changed["LoRA"], vae)
    parts = size + bytes_of(model.model.diffusion_model, storage)
    assert abs(path.stat().st_size / (parts + 2 * sum(tensor.numel() for tensor in exact.values())) - 1) < 0.01
    check(read(path), "text_encoders.clip_l.transformer.", "LoRA")


@pytest.mark.parametrize("experts", [4, 64])
def test_experts_are_read_and_no_patch_is_lost(comfy, wan, experts):
    """64 experts with a scale each have 64 inputs: a scale for each column, as ComfyUI's own unpacking has it."""
    exact, key = (
        torch.randn(experts, 64, 64) * torch.linspace(0.2, 2, experts)[:, None, None],
        "diffusion_model.blocks.0.experts.weight",
    )
    scales = exact.abs().amax((1, 2)) / 448
    bank = mixed_precision_ops({}, torch.bfloat16).MoEExperts(experts, 64, 64, bias=False)
    settings = dialects.comfy_quant_bytes({"format": "float8_e4m3fn", "num_experts": experts})
    codes = (exact / scales[:, None, None]).to(torch.float8_e4m3fn)
    bank.load_state_dict({"weight": codes, "weight_scale": scales, "comfy_quant": settings}, strict=False)
    model = loaded(comfy, wan, "fp8_e4m3fn")
    model.model.diffusion_model.blocks[0].experts = bank
    patched = model.clone()
    patched.add_patches({key: ("diff", (torch.randn(experts, 64, 64),))}, 1.0)
    for weight in (
        model.model_state_dict()[key],
        model.patch_weight_to_device(key, return_weight=True),
        read(written("ModelSave", model))[f"model.{key}"].dequantize(torch.float32),
    ):
        assert relative_error(exact, weight.float()) < 0.04
    for use in (
        families.denoise,
        lambda model: written("ModelSave", model),
        lambda model: model.patch_weight_to_device(key, return_weight=True),
        lambda model: model.patch_hook_weight_to_device(None, model.patches, key, {key: None}, MemoryCounter(0)),
    ):
        with pytest.raises(HalfsafeError, match="quantized expert weights"):
            use(patched)


@pytest.mark.skipif("nvfp4" not in held_storages(), reason="this ComfyUI does not hold NVFP4")
def test_a_weight_with_a_scale_for_inputs_is_its_product(comfy, wan, tmp_path):
    """`pre_quant_scale`, of AWQ: ComfyUI multiplies inputs by it, and reads and merges the weight without it."""
    tensors, scale = load_file(wan), torch.linspace(0.25, 4, 256)
    exact = tensors.pop(f"{LAYER}.weight").float()
    made = load_file(dialects.in_format(tmp_path / "one.safetensors", {LAYER: exact / scale}, {}, "nvfp4"))
    path = wan.with_name("awq.safetensors")
    save_file(tensors | made | {f"{LAYER}.pre_quant_scale": scale.bfloat16()}, path)
    model, other = families.load(comfy, path, "as_file", "bf16"), families.load(comfy, wan, "bf16", "bf16")
    lora, key = model_files.lora({LAYER: (256, 256)}, size=0.1), f"diffusion_model.{LAYER}.weight"
    with_lora, merge = (
        load_lora_for_models(model, None, lora, 1.0, 0.0)[0],
        core("comfy_extras.nodes_model_merging").ModelMergeSimple().merge,
    )
    changed = exact + model_files.lora_delta(lora, LAYER)
    assert hasattr(model.get_model_object(f"diffusion_model.{LAYER}"), "pre_quant_scale")
    errors = {
        "read": relative_error(exact, model.model_state_dict()[key].float()),
        "patched": relative_error(changed, with_lora.patch_weight_to_device(key, return_weight=True).float()),
        "into it": relative_error(
            exact, merge(model, other, 0.5)[0].patch_weight_to_device(key, return_weight=True).float()
        ),
        "into another": relative_error(
            exact, merge(other, model, 0.5)[0].patch_weight_to_device(key, return_weight=True).float()
        ),
    }
    for name, each in {"saved": with_lora, "merged and saved": merge(model, other, 0.5)[0]}.items():
        for run in ("unloaded", "loaded"):
            if run == "loaded":
                families.denoise(each)
            weight = read(written("ModelSave", each))[f"model.{key}"].dequantize(torch.float32)
            errors[f"{name}, {run}"] = relative_error(changed if each is with_lora else exact, weight)
            patched = each.patch_weight_to_device(key, return_weight=True).float()
            errors[f"{name}, {run}, read"] = relative_error(changed if each is with_lora else exact, patched)
    assert all(error < 0.22 for error in errors.values()), errors
