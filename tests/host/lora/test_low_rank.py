"""LoRAs on 8-bit weights: added to the results of their layers, so that a result with a LoRA is as near to the exact one as without."""

import gc

import pytest
import torch
from comfy import model_management
from comfy.lora import calculate_weight
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_bypass_lora_for_models, load_diffusion_model, load_lora_for_models
from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.nodes.host.lora.low_rank import LowRank, LowRankModel, is_left_out, why_merged
from halfsafe.nodes.host.lora.patcher import AddsLowRank
from halfsafe.precision.base.errors import HalfsafeError
from safetensors.torch import save_file
from support import families, model_files, tiny_models
from support.dynamic_vram import dynamic_vram
from support.families import load, with_compute
from support.guarding import guarded
from support.matmul_spy import Products
from support.measures import relative_error
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS = {
    **{f"blocks.{block}.ffn.0": (1024, 256) for block in (0, 1)},
    **{f"blocks.{block}.ffn.2": (256, 1024) for block in (0, 1)},
    **{
        f"blocks.{block}.{kind}_attn.{part}": (256, 256)
        for block in (0, 1)
        for kind in ("self", "cross")
        for part in "qkvo"
    },
}
EFFECTS = (6e-4, 5e-3, 5e-2)
FFN = "blocks.0.ffn.0"
KEY = f"diffusion_model.{FFN}.weight"


def with_lora(model, tensors, strength=1.0):
    return load_lora_for_models(model, None, dict(tensors), strength, 0.0)[0]


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def lora():
    return model_files.lora(LAYERS, rank=8)


@pytest.fixture(scope="module")
def exact(comfy, wan):
    return load(comfy, wan, "fp32", "fp32")


@pytest.fixture(scope="module")
def strengths(exact, lora, call):
    """Effect on the output -> the strength that has it."""
    plain, found = families.replay(exact, call), {}
    for effect in EFFECTS:
        strength = effect
        for _ in range(4):
            strength *= effect / relative_error(plain, families.replay(with_lora(exact, lora, strength), call))
        found[effect] = strength
    return found


WAYS = {
    "fp8, fp32": ("fp8_e4m3fn", "fp32"),
    "fp8, bf16": ("fp8_e4m3fn", "bf16"),
    "fp8, fp16": ("fp8_e4m3fn", "fp16"),
    "fp8, fp16_safe": ("fp8_e4m3fn", "fp16_safe"),
    "fp8 products": ("fp8_e4m3fn", "fp8"),
    "fp8_e5m2": ("fp8_e5m2", "fp16_safe"),
    "int8 products": ("int8", "auto"),
    "int8, fp16_safe": ("int8", "fp16_safe"),
    "int8, bf16": ("int8", "bf16"),
    "int8, fp32": ("int8", "fp32"),
}
BESIDE_CORES = ("fp8, bf16", "fp8, fp16_safe", "int8, bf16", "int8, fp16_safe", "int8 products")
"""Where the error is compared with that of the adapters of ComfyUI's bypass node."""
OWN = {"fp8 products": "fp8", "int8 products": "int8", "fp8, fp16_safe": "fp16_wide", "int8, fp32": "fp32"}


@pytest.mark.parametrize("way", WAYS)
def test_the_error_with_a_lora_is_the_error_without(comfy, wan, call, exact, lora, strengths, way):
    model = load(comfy, wan, *WAYS[way])
    without = relative_error(families.replay(exact, call), families.replay(model, call))
    errors, of_core = [], []
    for effect, strength in strengths.items():
        reference = families.replay(with_lora(exact, lora, strength), call)
        errors.append(relative_error(reference, families.replay(with_lora(model, lora, strength), call)))
        assert errors[-1] <= 1.1 * without, effect
        if way in BESIDE_CORES:
            cores = load_bypass_lora_for_models(model, None, dict(lora), strength, 0.0)[0]
            of_core.append(relative_error(reference, families.replay(cores, call)))
    assert not of_core or sum(errors) <= 1.02 * sum(of_core), "a single effect differs by more in bf16, either way"


def products(model, call):
    layers = {name: module for name, module in model.model.diffusion_model.named_modules() if name in LAYERS}
    families.replay(model, call)
    with Products(layers) as seen:
        families.replay(model, call)
    return seen


@pytest.mark.parametrize("memory", ["whole", "little"])
@pytest.mark.parametrize("way", OWN)
def test_the_layers_own_product_stays_what_it_was(comfy, wan, call, lora, way, memory, monkeypatch):
    model = with_lora(load(comfy, wan, *WAYS[way]), {name: tensor for name, tensor in lora.items() if "ffn.0" in name})
    if memory == "little":
        partially_load = type(model).partially_load
        monkeypatch.setattr(
            type(model), "partially_load", lambda self, device, *_, **__: partially_load(self, device, 1)
        )
    plain = families.replay(model, call)
    assert model.model.model_lowvram == (memory == "little")
    seen = products(model, call)
    assert set(seen.modes().values()) == {OWN[way]}
    thin = "fp32" if OWN[way] == "fp32" else "fp16"
    assert seen.beside == {name: [thin, thin] for name in LAYERS if "ffn.0" in name}
    layers = {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}
    assert layers[FFN]["mode"].replace("scaled", "wide") == OWN[way]
    assert "LoRAs added to the layer's output: 1" in layers[FFN]["reason"]
    assert "LoRA" not in layers["blocks.0.ffn.2"]["reason"]
    assert torch.equal(families.replay(model, call), plain)


@pytest.mark.parametrize("way", ["fp8, bf16", "int8 products"])
def test_loras_are_applied_together_and_each_clone_has_its_own(comfy, wan, call, exact, lora, way):
    other = model_files.lora({FFN: LAYERS[FFN]}, rank=3, seed=9)
    model = load(comfy, wan, *WAYS[way])
    plain = families.replay(model, call)
    floor = relative_error(families.replay(exact, call), plain)

    def stacked(start):
        return [
            start,
            with_lora(start, lora, 0.1),
            with_lora(with_lora(start, lora, 0.1), other, -0.2),
            with_lora(start, other, 0.3),
        ]

    ours = stacked(model)
    expected = [families.replay(one, call) for one in stacked(exact)]
    for index in (0, 1, 2, 3, 1, 3, 2, 0, 2):
        assert relative_error(expected[index], families.replay(ours[index], call)) < 1.1 * floor
    for reference in expected[1:]:
        assert relative_error(expected[0], reference) > 2 * floor, "each LoRA acts"
    assert torch.equal(families.replay(with_lora(model, lora, 0.0), call), plain)
    before = families.replay(ours[1], call)
    families.unload_models()
    assert torch.equal(families.replay(ours[1], call), before)
    assert torch.equal(families.replay(model, call), plain)
    assert not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules())


def test_the_factors_are_counted_and_go_with_the_model(comfy, wan, call, lora):
    model = with_lora(load(comfy, wan, "int8", "auto"), lora)
    (factors,) = model.model_patches_models()
    size = sum(8 * (outputs + inputs) * 2 for outputs, inputs in LAYERS.values())
    assert factors.model_size() == size
    families.replay(model, call)
    loaded = [one.model for one in model_management.current_loaded_models]
    assert factors in loaded and factors.loaded_size() == size
    assert model.clone().model_patches_models() == [factors], "clones share them"
    families.unload_models()
    assert factors.loaded_size() == 0
    before = len(model_management.current_loaded_models)
    del model, factors, loaded
    gc.collect()
    model_management.cleanup_models_gc()
    assert len(model_management.current_loaded_models) <= before


def test_a_model_of_comfyuis_own_loader_is_changed_by_our_node_alone(
    comfy, wan, models_dir, call, exact, lora, strengths
):
    from halfsafe.precision.commands.convert import convert_file
    from halfsafe.precision.plan.rules import rules_from

    path = models_dir / "diffusion_models" / "low_rank_int8.safetensors"
    convert_file(wan, path, "int8", rules_from())
    stock = with_lora(load_diffusion_model(str(path)), lora, strengths[5e-2])
    merged = families.replay(stock, call)
    assert not isinstance(stock, AddsLowRank)
    ours = with_compute(comfy, stock, "auto")
    reference = families.replay(with_lora(exact, lora, strengths[5e-2]), call)
    without = relative_error(families.replay(exact, call), families.replay(load(comfy, path, "as_file", "auto"), call))
    assert relative_error(reference, families.replay(ours, call)) < 1.1 * without < relative_error(reference, merged)
    assert torch.equal(families.replay(stock, call), merged)


def full_patch(model, value, key=KEY):
    clone = model.clone()
    clone.add_patches({key: value}, 0.5)
    return clone


def dora(lora):
    up, down = (lora[f"diffusion_model.{FFN}.lora_{part}.weight"] for part in "BA")
    return LoRAAdapter(set(), (up, down, None, None, torch.full((1024, 1), 3.0), None))


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
@pytest.mark.parametrize("kind", ["diff", "dora"])
def test_what_cannot_be_added_is_merged_and_named(comfy, wan, call, lora, storage, kind):
    value = (
        dora(lora)
        if kind == "dora"
        else ("diff", (torch.randn(1024, 256, generator=torch.Generator().manual_seed(1)),))
    )
    model = full_patch(load(comfy, wan, storage, "fp32"), value)
    weight = model.model.diffusion_model.blocks[0].ffn[0].weight.to(torch.float32).dequantize()
    exact = calculate_weight(model.patches[KEY], weight.clone(), KEY)
    both = with_lora(model, lora)
    families.replay(both, call)
    families.replay(model, call)
    held = model.model.diffusion_model.blocks[0].ffn[0].weight
    assert isinstance(held, QuantizedTensor)
    assert relative_error(exact, held.to(torch.float32).dequantize()) < 0.05
    reasons = {layer["name"]: layer["reason"] for layer in families.report(comfy, both)["layers"]}
    assert "quantized again" in reasons[FFN] and "other than a plain LoRA" in reasons[FFN]
    assert "LoRAs added" in reasons["blocks.0.ffn.2"]


ADAPTERS = {
    "alpha": lambda r: LoRAAdapter(set(), (r(1024, 4), r(4, 256), 2.0, None, None, None)),
    "convolution's": lambda r: LoRAAdapter(set(), (r(1024, 4, 1, 1), r(4, 256, 1, 1), None, None, None, None)),
    "loha": lambda r: LoHaAdapter(set(), (r(1024, 3), r(3, 256), 2.0, r(1024, 4), r(4, 256), None, None, None)),
    "lokr": lambda r: LoKrAdapter(set(), (r(8, 4), None, 2.0, None, None, r(128, 3), r(3, 64), None, None)),
    "lokr, both": lambda r: LoKrAdapter(set(), (None, None, 2.0, r(8, 3), r(3, 4), r(128, 3), r(3, 64), None, None)),
    "lokr, whole": lambda r: LoKrAdapter(set(), (None, r(8, 4), 2.0, r(128, 3), r(3, 64), None, None, None, None)),
}


@pytest.mark.parametrize("offset", [None, (0, 256, 512), (1, 64, 128)])
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize(("dtype", "size", "bound"), [(torch.float32, 1e5, 2e-3), (torch.bfloat16, 1.0, 2e-2)])
def test_what_is_added_is_what_comfyui_merges(name, offset, dtype, size, bound):
    """Inputs far beyond fp16's range, whose thin products are in fp16 all the same."""
    bound = 3 * bound if name == "loha" and dtype == torch.float32 else bound
    generator = torch.Generator().manual_seed(3)
    adapter = ADAPTERS[name](lambda *shape: torch.randn(shape, generator=generator))
    weight = torch.zeros(1024, 256)
    if offset is not None:
        weight = torch.zeros(2048, 256) if offset[0] == 0 else torch.zeros(1024, 512)
        offset = (offset[0], offset[1], (1024, 256)[offset[0]])
    patch = (0.7, adapter, 1.0, offset, None)
    assert not why_merged(patch, tuple(weight.shape))
    x = (torch.randn(2, 5, weight.shape[1], generator=generator) * size).to(dtype)
    change = LowRank.of(patch)
    model = LowRankModel({"key": [change]}, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16, x.device)
    model.set_strengths({("key", change): 0.7})
    expected = x.float() @ calculate_weight([patch], weight.clone(), "key").T
    assert relative_error(expected, model.layers[0](x, torch.zeros(2, 5, len(weight), dtype=dtype)).float()) < bound


CHANGES = {
    **ADAPTERS,
    "difference": lambda r: ("diff", (r(1024, 256),)),
    "another model's weight": lambda r: [(r(1024, 256), lambda weight, **kwargs: weight)],
}


class _FindsNaN(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not (isinstance(result, torch.Tensor) and result.is_floating_point() and result.isnan().any())
        return result


@pytest.mark.parametrize("name", CHANGES)
def test_a_dispatch_mode_does_not_change_what_becomes_of_a_patch(name):
    """One that reads numbers, which tensors on the meta device do not have."""
    patch = (1.0, CHANGES[name](torch.ones), 1.0, None, None)
    before = is_left_out(patch, (1024, 256)), is_left_out(patch, (1024, 200))
    merged = name in ADAPTERS and why_merged(patch, (1024, 256))
    with _FindsNaN():
        assert before == (is_left_out(patch, (1024, 256)), is_left_out(patch, (1024, 200))) == (False, True)
        assert merged == (name in ADAPTERS and why_merged(patch, (1024, 256)))


@pytest.mark.not_as_on_cuda("autograd records nothing in inference mode")
def test_a_gradient_passes():
    change = LowRank.of((1.0, ADAPTERS["alpha"](torch.ones), 1.0, None, None))
    model = LowRankModel({"key": [change]}, torch.float16, torch.device("cpu"))
    model.set_strengths({("key", change): 1.0})
    x = torch.ones(2, 256, requires_grad=True)
    model.layers[0](x, x @ torch.ones(256, 1024)).sum().backward()
    assert relative_error(torch.full((2, 256), 1024 * (1 + 4 * 2.0 / 4)), x.grad) < 1e-2


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ((1.0, ("set", (torch.zeros(8, 8),)), 1.0, None, None), "other than a plain LoRA"),
        ((1.0, LoRAAdapter(set(), (torch.zeros(8, 2), torch.zeros(2, 8), None, None, None, None)), 0.5, None, None), "merge"),
        ((1.0, LoRAAdapter(set(), (torch.zeros(8, 2), torch.zeros(2, 8), None, None, None, None)), 1.0, None, abs), "plain"),
        ((1.0, LoRAAdapter(set(), (torch.zeros(8, 2), torch.zeros(2, 9), None, None, None, None)), 1.0, None, None), "plain"),
        ((1.0, LoRAAdapter(set(), (torch.zeros(8, 2), torch.zeros(2, 8), None, None, None, [16, 8])), 1.0, None, None), "plain"),
    ],
)  # fmt: skip
def test_what_comfyui_merges_is_told_apart(patch, reason):
    assert reason in why_merged(patch, (8, 8))


def test_a_lora_that_overflows_is_recovered(comfy, wan, call, lora):
    plain, quantized = (load(comfy, wan, *how) for how in (("fp32", "fp32"), ("fp8_e4m3fn", "fp16")))
    huge = {name: tensor * 300 for name, tensor in lora.items() if "ffn.2" in name}
    reference = families.replay(with_lora(plain, huge, 30.0), call)
    assert not torch.isfinite(families.replay(with_lora(quantized, huge, 30.0), call)).all()
    model = guarded(comfy, with_lora(quantized, huge, 30.0))
    for _ in range(2):
        assert relative_error(reference, families.replay(model, call)) < 0.1
    assert Guard.on(model).report(model).verdict == "recovered"


def test_layers_that_run_on_the_text_before_the_models_calls(comfy, models_dir):
    """Anima's text adapter, which ComfyUI runs in ``extra_conds``."""
    path = tiny_models.anima(models_dir / "diffusion_models" / "anima_low_rank.safetensors")
    states = torch.randn(1, 8, 1024, generator=torch.Generator().manual_seed(1))
    cond = [[states, {"t5xxl_ids": torch.arange(6), "t5xxl_weights": torch.ones(6)}]]
    exact = load(comfy, path, "fp32", "fp32")
    modules = dict(exact.model.diffusion_model.named_modules())
    shapes = {
        name: tuple(modules[name].weight.shape)
        for name in (f"llm_adapter.blocks.{b}.mlp.{i}" for b in (0, 1) for i in (0, 2))
    }
    tensors = model_files.lora(shapes, rank=8)

    def latent_of(model):
        return families.sample(model, "anima", cond=cond, steps=1)

    plain, expected = latent_of(exact), latent_of(with_lora(exact, tensors, 300.0))
    effect = relative_error(plain, expected)
    for compute in ("fp32", "fp16_safe"):  # auto's bf16 rounds what an effect this large adds by a tenth of the floor
        model = load(comfy, path, "int8", compute)
        floor = relative_error(plain, latent_of(model))
        ours = with_lora(model, tensors, 300.0)
        ours = guarded(comfy, ours) if compute == "fp16_safe" else ours
        error = relative_error(expected, latent_of(ours))
        assert error < 1.1 * floor < 0.8 * (floor**2 + effect**2) ** 0.5, "without the LoRA both add up"
        assert "LoRAs added" in next(
            layer["reason"] for layer in families.report(comfy, ours)["layers"] if layer["name"] in shapes
        )
        assert not any("LowRank" in note for note in families.report(comfy, ours)["notes"])


def test_a_strength_that_changes_repeats_no_later_call(comfy, wan, call, lora):
    model = load(comfy, wan, "fp8_e4m3fn", "fp16_safe")
    for strength in (0.0, 0.3, 0.6):
        ours = with_lora(model, lora, strength) if strength else model
        for _ in range(2):
            families.replay(ours, call)
        assert compute_of(ours).runs.last_of(ours).calibration.repeats == 0


@pytest.mark.parametrize("way", ["transferred", "prefetched", "resident"])
@torch.inference_mode()
def test_dynamic_vram(comfy, wan, call, exact, lora, way):
    model = load(comfy, wan, "int8", "fp16_safe")
    without = relative_error(families.replay(exact, call), families.replay(model, call))
    ours, reference = with_lora(model, lora, 0.05), families.replay(with_lora(exact, lora, 0.05), call)
    families.replay(ours, call)
    with dynamic_vram(ours, way):
        results = [families.replay(ours, call) for _ in range(2)]
    assert max(relative_error(reference, result) for result in results) < 1.1 * without


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_loras_by_hooks(comfy, wan, models_dir, lora, storage):
    """Also where the model has LoRAs of its own, and where a hook's is on from a part of the steps."""
    from comfy_extras import nodes_hooks as nodes

    save_file(lora, str(models_dir / "loras" / "by_hook.safetensors"))
    (hooks,) = nodes.CreateHookLoraModelOnly().create_hook_model_only("by_hook.safetensors", 0.2)
    (off,) = nodes.CreateHookKeyframe().create_hook_keyframe(0.0, 0.0)
    (on,) = nodes.CreateHookKeyframe().create_hook_keyframe(1.0, 0.5, off)
    (hooks,) = nodes.SetHookKeyframes().set_hook_keyframes(hooks, on)
    cond = families.conditioning("wan")
    (with_hooks,) = nodes.ConditioningSetProperties().set_properties(cond, 1.0, "default", hooks=hooks)
    exact, model = load(comfy, wan, "fp32", "fp32"), load(comfy, wan, storage, "fp16_safe")
    for reference, ours in ((exact, model), (with_lora(exact, lora, 0.1), with_lora(model, lora, 0.1))):
        expected, plain = (families.sample(reference, "wan", cond=one, steps=2) for one in (with_hooks, cond))
        without = relative_error(plain, families.sample(ours, "wan", cond=cond, steps=2))
        assert relative_error(expected, families.sample(ours, "wan", cond=with_hooks, steps=2)) < 1.15 * without
        assert relative_error(plain, expected) > 2 * without, "the hook's LoRA acts"


def test_a_hook_that_cannot_be_added_is_refused(comfy, wan, lora):
    model = load(comfy, wan, "int8", "auto")
    model.hook_patches["hook"] = {KEY: [(1.0, dora(lora), 1.0, None, None)]}
    with pytest.raises(HalfsafeError, match="A hook applies a patch .* to '.*ffn.0.weight'"):
        model.patch_hook_weight_to_device(None, {}, KEY)


def test_weights_without_a_scale(comfy, wan, call, lora):
    model = load_diffusion_model(str(wan), model_options={"dtype": torch.float8_e4m3fn})
    ours = with_lora(with_compute(comfy, model, "fp16_safe"), lora)
    assert products(ours, call).beside.keys() == LAYERS.keys()
