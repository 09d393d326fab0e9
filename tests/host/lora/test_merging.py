"""LoRAs whose ranks add up to more than an 8-bit weight: merged into it once, where rounding leaves most of what they change."""

import re

import pytest
import torch
from comfy import model_management
from comfy.lora import calculate_weight
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_diffusion_model, load_lora_for_models
from comfy.utils import string_to_seed
from halfsafe.nodes.host.lora import merging
from halfsafe.nodes.host.lora.control_lora import DequantizedState
from halfsafe.precision.arithmetic.merging import outweighs
from safetensors.torch import save_file
from support import families, model_files
from support.dynamic_vram import dynamic_vram
from support.families import load, with_compute
from support.measures import relative_error
from support.products import Products

LAYERS = {
    **{f"blocks.{block}.ffn.0": (1024, 256) for block in (0, 1)},
    **{f"blocks.{block}.ffn.2": (256, 1024) for block in (0, 1)},
    **{f"blocks.{block}.self_attn.{part}": (256, 256) for block in (0, 1) for part in "qkvo"},
}
FFN = "blocks.0.ffn.0"
KEY = f"diffusion_model.{FFN}.weight"
RANK, COUNT = 32, 4
WAYS = {"fp8, fp16_safe": ("fp8_e4m3fn", "fp16_safe"), "fp8 products": ("fp8_e4m3fn", "fp8"), "int8 products": ("int8", "auto"), "int8, fp16_safe": ("int8", "fp16_safe")}
OWN = {"fp8, fp16_safe": "fp16", "fp8 products": "fp8", "int8 products": "int8", "int8, fp16_safe": "fp16"}


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def exact(comfy, wan):
    return load(comfy, wan, "fp32", "fp32")


@pytest.fixture(scope="module")
def loras(exact):
    """Four LoRAs, the change of each a twentieth of every weight's norm at a strength of 1."""
    made = [model_files.lora(LAYERS, RANK, seed=seed) for seed in range(COUNT)]
    for tensors in made:
        for name in LAYERS:
            weight = weight_of(exact, name).detach()
            change = model_files.lora_delta(tensors, name)
            tensors[f"diffusion_model.{name}.lora_B.weight"] *= weight.norm() / change.norm() / 20
    return made


def weight_of(model, name):
    return model.get_model_object(f"diffusion_model.{name}").weight


def as_numbers(weight) -> torch.Tensor:
    weight = weight.detach().to(torch.float32)
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.clone()


def with_loras(model, loras, strength=1.0):
    for tensors in loras:
        model = load_lora_for_models(model, None, dict(tensors), strength, 0.0)[0]
    return model


def beside(model, call) -> tuple[dict, set]:
    """The products beside the layers' own, and the modes of those."""
    families.replay(model, call)
    named = dict(model.model.diffusion_model.named_modules())
    with Products({name: named[name] for name in LAYERS}) as seen:
        families.replay(model, call)
    return seen.beside, set(seen.modes().values())


def told(comfy, model) -> tuple[dict[str, str], list[str]]:
    """The reasons of the layers, and the notes about LoRAs."""
    report = families.report(comfy, model)
    return {layer["name"]: layer["reason"] for layer in report["layers"] if layer["name"] in LAYERS}, [note for note in report["notes"] if "LoRAs" in note]


@pytest.mark.parametrize("way", WAYS)
def test_many_loras_cost_no_product_and_the_error_that_is_told(comfy, wan, call, exact, loras, way):
    storage, compute = WAYS[way]
    model = load(comfy, wan, storage, compute)
    bases = {name: as_numbers(weight_of(model, name)) for name in LAYERS}
    rounding = max(relative_error(as_numbers(weight_of(exact, name)), base) for name, base in bases.items())
    without = relative_error(families.replay(exact, call), families.replay(model, call))
    ours = with_loras(model, loras)
    seen, modes = beside(ours, call)
    assert seen == {} and modes == {OWN[way]} and ours.model_patches_models() == []
    reasons, notes = told(comfy, ours)
    of_weight, of_change = map(float, re.search(r"off by at most ([\d.]+)% of a weight and ([\d.]+)%", *notes).groups())
    for name, reason in reasons.items():
        assert f"LoRAs of summed rank {RANK * COUNT} merged into it; rounding it is off by" in reason
        whole = calculate_weight(ours.patches[f"diffusion_model.{name}.weight"], bases[name].clone(), "")
        held = as_numbers(weight_of(ours, name))
        error, change = relative_error(whole, held), float((held - whole).norm() / (whole - bases[name]).norm())
        assert error <= of_weight / 100 + 5e-5 and change <= of_change / 100 + 5e-4
        own = [float(number) for number in re.findall(r"([\d.]+)%", reason)]
        assert own == pytest.approx([100 * error, 100 * change], abs=0.06)
    reference = families.replay(with_loras(exact, loras), call)
    error = relative_error(reference, families.replay(ours, call))
    assert error <= 1.1 * without * (1 + (of_weight / 100 / rounding) ** 2) ** 0.5
    assert relative_error(families.replay(exact, call), families.replay(ours, call)) > 1.2 * without, "the LoRAs act"


@pytest.fixture
def made(monkeypatch):
    """The shapes of the weights that are quantized anew."""
    found, original = [], merging.set_weight_by_class

    def count(module, weight, **options):
        found.append(tuple(weight.shape))
        return original(module, weight, **options)

    monkeypatch.setattr(merging, "set_weight_by_class", count)
    return found


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_they_are_merged_once_and_the_weights_come_back(comfy, wan, call, loras, made, storage):
    model = load(comfy, wan, storage, "auto")
    plain, before = families.replay(model, call), {name: weight_of(model, name).state_dict("weight") for name in LAYERS}
    before = {name: {part: tensor.clone() for part, tensor in state.items()} for name, state in before.items()}
    ours = with_loras(model, loras)
    first = families.replay(ours, call)
    assert len(made) == 2 * len(LAYERS), "measured and merged"
    for again in (ours, ours.clone()):
        assert torch.equal(families.replay(again, call), first)
    assert len(made) == 2 * len(LAYERS)
    families.unload_models()
    assert torch.equal(families.replay(ours, call), first) and len(made) == 3 * len(LAYERS), "merged anew, as it was unloaded"
    stronger = with_loras(model, loras, 2.0)
    other = families.replay(stronger, call)
    assert len(made) == 5 * len(LAYERS) and relative_error(first, other) > 0.01
    few = with_loras(model, loras[:1])
    assert beside(few, call)[0].keys() == LAYERS.keys() and len(made) == 5 * len(LAYERS)
    assert torch.equal(families.replay(model, call), plain)
    for name, state in before.items():
        held = weight_of(model, name).state_dict("weight")
        assert held.keys() == state.keys()
        for part, tensor in state.items():
            assert torch.equal(held[part].float(), tensor.float()), (name, part)
    assert torch.equal(families.replay(ours, call), first)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_they_are_added_in_fp32_where_comfyui_adds_in_fp16(comfy, wan, loras, storage, monkeypatch):
    """As on a GPU: two that take each other back but for a little would leave nothing, or Inf."""
    monkeypatch.setitem(model_management.LORA_COMPUTE_DTYPES, torch.device("cpu"), torch.float16)
    every = [(loras[0], 3e5), (loras[0], -3e5), *((tensors, 1.0) for tensors in loras)]
    start = load(comfy, wan, storage, "fp16_safe")
    ours, expected = start, with_loras(start, loras)
    for tensors, strength in every:
        ours = load_lora_for_models(ours, None, dict(tensors), strength, 0.0)[0]
    base = as_numbers(weight_of(start, FFN))
    exact = calculate_weight(expected.patches[KEY], base.clone(), KEY)
    model_management.load_models_gpu([ours])
    held = as_numbers(weight_of(ours, FFN))
    assert isinstance(weight_of(ours, FFN), QuantizedTensor) and not torch.equal(held, base)
    assert relative_error(exact, held) < 1.05 * merging.error_of(expected, KEY, expected.get_model_object(f"diffusion_model.{FFN}")).of_weight


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_savers_get_them_merged_once(comfy, wan, loras, storage):
    """ComfyUI's savers, which load a model before they save it."""
    ours = with_loras(load(comfy, wan, storage, "fp16_safe"), loras)
    exact = calculate_weight(ours.patches[KEY], as_numbers(weight_of(ours, FFN)), KEY)
    model_management.load_models_gpu([ours])
    state, held = ours.model_state_dict_for_saving(), weight_of(ours, FFN)
    assert relative_error(exact, as_numbers(held)) < 0.03
    for name, tensor in held.state_dict(KEY).items():
        assert torch.equal(state[name].float(), tensor.float()), name


@pytest.mark.parametrize(("storage", "strength"), [("fp8_e4m3fn", 0.1), ("int8", 0.02)])
def test_what_rounding_would_lose_stays_beside(comfy, wan, call, exact, loras, storage, strength):
    model = load(comfy, wan, storage, "fp16_safe")
    without = relative_error(families.replay(exact, call), families.replay(model, call))
    ours = with_loras(model, loras, strength)
    assert beside(ours, call)[0].keys() == LAYERS.keys()
    reference = families.replay(with_loras(exact, loras, strength), call)
    assert relative_error(reference, families.replay(ours, call)) < 1.1 * without
    reasons, notes = told(comfy, ours)
    assert all(f"LoRA of rank {RANK * COUNT} added beside the weight; merging would round" in reason for reason in reasons.values())
    assert len(notes) == 1 and notes[0].startswith(f"{len(LAYERS)} layers keep LoRAs beside")


def test_each_layer_goes_by_its_own_shape(comfy, wan, call, loras):
    """Rank 96 is more than a 256 x 256 weight takes and less than a 1024 x 256 one does."""
    ours = with_loras(load(comfy, wan, "int8", "auto"), loras[:3])
    wide = {name for name, shape in LAYERS.items() if not outweighs(3 * RANK, shape)}
    assert {len(wide), len(LAYERS)} == {4, 12}
    assert beside(ours, call)[0].keys() == wide
    reasons, notes = told(comfy, ours)
    assert {name for name, reason in reasons.items() if "beside" in reason} == wide
    assert notes[0].startswith("8 layers have their LoRAs merged") and "add up to 96 to 96" in notes[0]


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_weights_that_are_moved_in_and_out_are_not_rounded(comfy, wan, call, exact, loras, storage, monkeypatch):
    """ComfyUI adds the patches to the dequantized weight at each call."""
    model = load(comfy, wan, storage, "fp16_safe")
    plain = families.replay(model, call)
    without = relative_error(families.replay(exact, call), plain)
    reference = families.replay(with_loras(exact, loras), call)
    families.unload_models()  # what was loaded whole stays
    partially_load = type(model).partially_load
    monkeypatch.setattr(type(model), "partially_load", lambda self, device, *_, **__: partially_load(self, device, 1))
    ours = with_loras(model, loras)
    assert relative_error(reference, families.replay(ours, call)) < 1.1 * without and ours.model.model_lowvram
    assert ours.model_patches_models() == []
    monkeypatch.undo()
    assert torch.equal(families.replay(model, call), plain)


@pytest.mark.parametrize("way", ["transferred", "prefetched", "resident"])
@pytest.mark.parametrize(("storage", "compute"), [("int8", "auto"), ("fp8_e4m3fn", "fp16_safe")])
@torch.inference_mode()
def test_dynamic_vram_merges_what_it_moves(comfy, wan, call, exact, loras, storage, compute, way):
    reference = families.replay(with_loras(exact, loras), call)
    merged = relative_error(reference, families.replay(with_loras(load(comfy, wan, storage, compute), loras), call))
    model = load(comfy, wan, storage, compute)
    families.replay(model, call)
    with dynamic_vram(model, way, with_loras(model, loras).patches):
        for module in (model.get_model_object(f"diffusion_model.{name}") for name in LAYERS):
            module.seed_key = ""
        results = [families.replay(model, call) for _ in range(2)]
    assert max(relative_error(reference, result) for result in results) < 1.1 * merged


def test_dynamic_vram_rounds_them_to_nearest(comfy, wan, loras):
    ours = with_loras(load(comfy, wan, "int8", "auto"), loras)
    modules = [ours.get_model_object(f"diffusion_model.{name}") for name in LAYERS]
    for module in modules:
        module._v, module.seed_key = "vbar", "blocks.0"
    base = as_numbers(weight_of(ours, FFN))
    exact = calculate_weight(ours.patches[KEY], base.clone(), KEY)
    try:
        ours.load(torch.device("cpu"), full_load=True)
        weight_of(ours, FFN).copy_(ours.backup[KEY].weight)  # dynamic VRAM changes no weight of the host's
        copied = DequantizedState(ours, ours.model.diffusion_model.state_dict())[f"{FFN}.weight"]
    finally:
        for module in modules:
            del module._v
    assert {string_to_seed(module.seed_key) for module in modules} == {0}
    assert relative_error(exact, copied.float()) < 0.02 < relative_error(exact, base), "a ControlLora copies it with its LoRAs"


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_loras_by_hooks_stay_beside(comfy, wan, models_dir, loras, storage):
    """Also where the model has merged ones, and where a hook's is on from a part of the steps."""
    from comfy_extras import nodes_hooks as nodes

    every = {}
    for name in LAYERS:
        for part, axis in (("A", 0), ("B", 1)):
            key = f"diffusion_model.{name}.lora_{part}.weight"
            every[key] = torch.cat([tensors[key] for tensors in loras], axis)
    save_file(every, str(models_dir / "loras" / "merged_for_rank.safetensors"))
    (hooks,) = nodes.CreateHookLoraModelOnly().create_hook_model_only("merged_for_rank.safetensors", 3.0)
    (off,) = nodes.CreateHookKeyframe().create_hook_keyframe(0.0, 0.0)
    (on,) = nodes.CreateHookKeyframe().create_hook_keyframe(1.0, 0.5, off)
    (hooks,) = nodes.SetHookKeyframes().set_hook_keyframes(hooks, on)
    cond = families.conditioning("wan")
    (with_hooks,) = nodes.ConditioningSetProperties().set_properties(cond, 1.0, "default", hooks=hooks)
    exact, model = load(comfy, wan, "fp32", "fp32"), load(comfy, wan, storage, "fp16_safe")
    for start in (model, with_loras(model, loras)):
        reference = with_loras(exact, loras) if start is not model else exact
        expected, plain = (families.sample(reference, "wan", cond=one, steps=2) for one in (with_hooks, cond))
        without = relative_error(plain, families.sample(start, "wan", cond=cond, steps=2))
        assert relative_error(expected, families.sample(start, "wan", cond=with_hooks, steps=2)) < 1.15 * without
        assert relative_error(plain, expected) > 2 * without, "the hook's LoRA acts"


def test_weights_without_a_scale_keep_them_beside(comfy, wan, call, loras):
    model = load_diffusion_model(str(wan), model_options={"dtype": torch.float8_e4m3fn})
    ours = with_loras(with_compute(comfy, model, "fp16_safe"), loras)
    assert weight_of(ours, FFN).dtype == torch.float8_e4m3fn and not isinstance(weight_of(ours, FFN), QuantizedTensor)
    assert beside(ours, call)[0].keys() == LAYERS.keys()
