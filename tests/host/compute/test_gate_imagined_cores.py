"""Imagined versions of ComfyUI: what is not passed changes nothing, what is passed is handed on or met by name, and no picture is wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import comfy.ldm.lumina.model as lumina
import comfy.ldm.modules.attention
import comfy.ops
import pytest
import torch
from comfy.ldm.wan.model import WanSelfAttention
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui import gate, kernels, self_test
from halfsafe.nodes.host.comfyui.gate import MET, OWN_CODE
from halfsafe.nodes.host.comfyui.weights import calling_layers, uncast_norm
from halfsafe.nodes.host.compute import bound
from halfsafe.nodes.host.compute.bound import AS_STORED
from halfsafe.nodes.host.compute.core_layers import PlannedLayers
from halfsafe.nodes.host.lora.patcher import AddsLowRank
from halfsafe.precision.base.patching import patched
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.plan.compute import ComputePlan
from halfsafe.precision.version import VERSION
from support import families, imagined_cores, model_files, next_core, tiny_models
from support.families import load
from support.guarding import guarded, inside, left_on
from support.imagined_cores import (
    FORMS,
    GAIN,
    LAYERS,
    MIXED,
    attention_takes,
    function_takes,
    layers_take,
    model_takes,
    never_called,
    sampling_takes,
)
from support.matmul_spy import Products
from support.measures import relative_error
from support.summing import accumulation

LORA = {"blocks.0.self_attn.q": (256, 256), "blocks.0.ffn.2": (256, 1024)}


def with_lora(model):
    return load_lora_for_models(model, None, model_files.lora(LORA, rank=8), 4.0, 0.0)[0]


SETTINGS = {
    "fp16_safe": (True, lambda comfy, path: load(comfy, path, "fp16", "fp16_safe")),
    "auto": (
        True,
        lambda comfy, path: comfy.run(
            "HalfsafeAutoPrecision", model=load(comfy, path, "fp16", "auto"), goal="balanced", guard="off"
        )[0],
    ),
    "guard": (True, lambda comfy, path: guarded(comfy, load(comfy, path, "fp16", "fp16"))),
    "fp16 sums": (
        False,
        lambda comfy, path: accumulation(comfy, load(comfy, path, "fp16", "fp16"), fp16_accumulation="auto"),
    ),
    "fp8 in fp8": (False, lambda comfy, path: load(comfy, path, "fp8_e4m3fn", "fp8")),
    "int8 in int8": (False, lambda comfy, path: load(comfy, path, "int8", "int8")),
    "LoRA beside fp8": (False, lambda comfy, path: with_lora(load(comfy, path, "fp8_e4m3fn", "bf16"))),
    "LoRA beside int8": (False, lambda comfy, path: with_lora(load(comfy, path, "int8", "int8"))),
}
"""Setting -> whether its model overflows in plain fp16, and how it is made."""
PROFILES = {"auto": "sm_75", "fp16 sums": "sm_86"}
CORES = {
    **{
        f"{kind}, {form}, not passed": (lambda kind=kind, form=form: layers_take(kind, form))
        for kind in ("Linear", MIXED)
        for form in ("keyword", "placed")
    },
    "Linear, keyword, its default passed": lambda: layers_take("Linear", "keyword", (None,)),
    **{f"Linear, {form}, passed": (lambda form=form: layers_take("Linear", form, (0.9,))) for form in FORMS},
    "Linear, input renamed": imagined_cores.layers_renamed,
    "Conv3d, keyword, not passed": lambda: layers_take("Conv3d"),
    **{
        f"{kind}, keyword, passed": (lambda kind=kind: layers_take(kind, "keyword", (0.9,)))
        for kind in ("Conv3d", "RMSNorm", "LayerNorm")
    },
    "attention, keyword, not passed": attention_takes,
    **{
        f"attention, {form}, passed": (lambda form=form: attention_takes(form, (0.9,)))
        for form in ("keyword", "placed")
    },
    "attention, mask renamed, precision removed": lambda: attention_takes("renamed"),
    **{f"apply_model, {form}": (lambda form=form: model_takes(form)) for form in ("placed", "removed", "renamed")},
    **{f"apply_model, {form}, passed": (lambda form=form: model_takes(form)) for form in ("keyword", "placed")},
    "calculate_input, not passed": sampling_takes,
    "calculate_input, passed": lambda: sampling_takes((0.9,)),
    "calculate_input of an own class, passed": lambda: sampling_takes((0.9,), own=True),
    "q, k and v in one product": lambda: never_called(WanSelfAttention, "q", "k", "v"),
    "classes in another module": imagined_cores.moved,
}
"""What is imagined -> a context in which the pinned core has it."""
EVERY_SETTING = (
    "Linear, keyword, passed",
    "Linear, keyword, not passed",
    "attention, keyword, passed",
    "apply_model, placed",
    "calculate_input, passed",
    "q, k and v in one product",
)
"""One core of each kind, on which every setting is tried; on the others, which differ by how an argument is passed, a third of them in turn."""
MORE_ERROR = 1.3
"""A layer that runs its own code rounds otherwise than one of ours; an argument that is dropped is off by 0.1 and more."""


def outcome(comfy, setting: str, path, call, changes: dict, reference: torch.Tensor) -> tuple[float, int]:
    """The error of a setting to ComfyUI's own fp32 with the same weights, and how many modules had a forward of ours."""
    model, exchanged = SETTINGS[setting][1](comfy, path), []

    def look(executor, args, kwargs):
        exchanged.append(sum("forward" in has for has in left_on(model.model.diffusion_model).values()))
        return executor(*args, **kwargs)

    model = inside(model, look)
    results = [families.replay(model, call, **changes) for _ in range(2)]
    return max(relative_error(reference, result) for result in results), max(exchanged)


@pytest.fixture(scope="module")
def tried(comfy, models_dir, call):
    """Setting -> its outcome, on a core; of models of one block, whose layers are called as those of the next would be."""
    clean, loud = (
        write(models_dir / "diffusion_models" / f"imagined_{write.__name__}.safetensors", blocks=1)
        for write in (tiny_models.wan, tiny_models.wan_overflowing)
    )

    def of(core, changes: dict, settings: Iterable[str] = SETTINGS) -> dict[str, tuple[float, int]]:
        references, seen = {}, {}
        with pytest.MonkeyPatch.context() as patch, core():
            for setting in settings:
                overflows = SETTINGS[setting][0]
                patch.setenv("HALFSAFE_DEVICE_PROFILE", PROFILES.get(setting, "sm_89"))
                path, changed = loud if overflows else clean, "LoRA" in setting
                if (path, changed) not in references:
                    exact = load(comfy, path, "fp32", "fp32")
                    references[path, changed] = families.replay(with_lora(exact) if changed else exact, call, **changes)
                seen[setting] = outcome(comfy, setting, path, call, changes, references[path, changed])
        return seen

    return of


@pytest.fixture(scope="module")
def pinned(tried):
    return tried(contextlib.nullcontext, {})


@pytest.mark.parametrize("core", CORES)
def test_each_setting_acts_and_is_as_near_to_fp32_as_on_the_pinned_core(tried, pinned, core):
    changes = {GAIN: 0.9} if core.startswith("apply_model") and core.endswith("passed") else {}
    place = [*CORES].index(core)
    settings = [setting for index, setting in enumerate(SETTINGS) if core in EVERY_SETTING or index % 3 == place % 3]
    seen = tried(CORES[core], changes, settings)
    print(core, {setting: f"{error:.2g} with {count} forwards" for setting, (error, count) in seen.items()})
    assert {
        setting: error for setting, (error, _) in seen.items() if not error <= MORE_ERROR * pinned[setting][0] + 1e-3
    } == {}
    assert {setting: count for setting, (_, count) in seen.items()} == {
        setting: pinned[setting][1] for setting in settings
    }


def a_layer(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer of a kind, with random weights, and an input of it."""
    if kind == MIXED:
        layer = comfy.ops.mixed_precision_ops({}, torch.float32).Linear(16, 16, device="cpu")
        layer.weight = torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)
    elif kind.startswith("Conv"):
        layer = getattr(comfy.ops.manual_cast, kind)(16, 16, 3, padding=1, device="cpu", dtype=torch.float32)
    elif kind == "GroupNorm":
        layer = comfy.ops.manual_cast.GroupNorm(4, 16, device="cpu", dtype=torch.float32)
    else:
        layer = getattr(comfy.ops.manual_cast, kind)(
            *(16,) * (1 + (kind == "Linear")), device="cpu", dtype=torch.float32
        )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    spatial = int(kind[-2]) if kind.startswith("Conv") else 0
    return layer, torch.randn(2, 16, *(5,) * spatial)


@pytest.mark.parametrize("passed", [(), (None,), (0.5,)], ids=["not passed", "its default passed", "passed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_each_kind_returns_what_it_returns_alone(kind, form, passed):
    with layers_take(kind, form, passed or ((1.0,) if form == "required" else ())):
        layer, x = a_layer(kind)
        expected = layer(x)
        if kind.endswith("Norm"):
            patches = uncast_norm(layer)
            assert patches
        else:
            planned = PlannedLayers(
                ComputePlan.of_layers({"a": LayerPlan(mode="fp16_wide", stream="fp32")}), {"a": layer}
            )
            patches = planned.patches
        with patched(patches):
            assert relative_error(expected, layer(x)) < 2e-3
        given = passed == (0.5,) or form == "required"
        assert gate.ran_own(layer) == (given and not kind.endswith("Norm"))
        if not kind.endswith("Norm"):
            assert planned.forwards["a"].mode == ("fp32" if given else "fp16_wide")


def test_a_convolution_s_own_arguments_are_given_to_our_product():
    layer, x = a_layer("ConvTranspose2d")
    layer.stride = (2, 2)
    planned = PlannedLayers(ComputePlan.of_layers({"a": LayerPlan(mode="fp16_wide", stream="fp32")}), {"a": layer})
    expected = layer(x, output_size=(10, 10))
    with layers_take("ConvTranspose2d"), patched(planned.patches):
        assert relative_error(expected, layer(x, output_size=(10, 10))) < 2e-3
    assert not gate.ran_own(layer)


def test_report_badge_and_log_name_the_layers_and_the_argument(comfy, wan, call, caplog):
    gate._met.clear()
    with layers_take("Linear", "keyword", (0.9,)), caplog.at_level(logging.WARNING, "halfsafe"):
        model = load(comfy, wan, "fp16", "fp16_safe")
        families.replay(model, call)
        found = families.report(comfy, model)
    layer = "blocks.0.self_attn.q"
    assert f"calls layers with `{GAIN}`" in caplog.text and "diffusion_model." in caplog.text
    notes = [note for note in found["notes"] if f"`{GAIN}`" in note]
    assert [note.partition(": ")[0] for note in notes] == [
        MET.format("This ComfyUI", GAIN, VERSION, "").partition(": ")[0]
    ]
    assert {each["mode"] for each in found["layers"] if each["name"] == layer} == {"fp32"}
    (badge,) = comfy.nodes["HalfsafeComputeDtype"].execute(model, "fp16_safe").ui["halfsafe_badge"]
    assert any(OWN_CODE.partition("{} ")[2].format(GAIN) in word for word in badge)


def test_a_layer_whose_code_a_pack_replaced_runs_that_code_and_the_pack_is_named_for_an_argument(monkeypatch):
    """A function that stands in a folder of ``custom_nodes``, and takes what ComfyUI's own does not."""
    linear = comfy.ops.disable_weight_init.Linear
    forward = imagined_cores.taking(linear.forward, "keyword")
    forward.__code__ = forward.__code__.replace(co_filename="/a/custom_nodes/faster_layers/__init__.py")
    monkeypatch.setattr(linear, "forward", forward)
    layer, x = a_layer("Linear")
    planned = PlannedLayers(ComputePlan.of_layers({"a": LayerPlan(mode="fp16_wide", stream="fp32")}), {"a": layer})
    assert not planned.operations
    with patched(planned.patches):
        assert relative_error(linear.forward(layer, x, gain=2.0), layer(x, gain=2.0)) < 1e-6
    model = SimpleNamespace(diffusion_model=torch.nn.ModuleDict({"a": layer}))
    assert gate.met_in(model) == {}
    gate.Gate.of(layer, True).note_met([GAIN])
    assert [*gate.met_in(model).values()] == [MET.format("The pack faster_layers", GAIN, VERSION, "a")]


# functions and methods


@pytest.mark.parametrize("name", imagined_cores.PATCHER_METHODS)
def test_a_method_of_a_patcher_is_handed_what_it_takes(comfy, wan, name):
    seen: list = []
    with imagined_cores.patcher_takes(name, seen):
        model = with_lora(load(comfy, wan, "int8", "int8"))
        assert isinstance(model, AddsLowRank)
        seen.clear()
        getattr(model, name)(*([None] if "hook" in name else []), gain=1)
    assert seen[0] == 1


def test_functions_that_multiply_past_a_layer_are_handed_what_they_take(monkeypatch):
    layer = next(layer for kind, layer, _ in self_test._layers(AS_STORED) if kind == "int8_tensorwise")
    monkeypatch.setattr(lumina, "_int8_convrot_linear", lambda linear: True, raising=False)
    with (
        function_takes(lumina, "_int8_convrot_linear") as fuses,
        function_takes(comfy.ops, "linear_input_act") as act,
        calling_layers([layer]),
    ):
        assert lumina._int8_convrot_linear(layer, gain=1) and fuses == [1]
        comfy.ops.linear_input_act(layer, torch.ones(1, self_test.SIZE), "gelu_tanh", gain=2)
        assert act == [2]
        layer.forward = layer.forward
        assert lumina._int8_convrot_linear(layer, gain=1), "its own forward"
        layer.forward = lambda x: x
        assert not lumina._int8_convrot_linear(layer, gain=1), "a forward of ours"


# the self-test


class Halved:
    """A kernel whose result is half of what it should be."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, *args):
        result = self.kernel(*args)
        return (result.float() / 2).to(result.dtype)


@pytest.fixture
def checked():
    """Run the self-test; what it found is forgotten afterwards."""
    yield partial(self_test.check_core, AS_STORED)
    gate.UNEQUAL.clear()


def test_the_pinned_core_and_the_next_run_alike_through_our_code(checked):
    checked()
    assert not gate.UNEQUAL
    spy = Products({})
    with next_core.installed(), spy:
        checked()
    assert not gate.UNEQUAL
    assert any(product.operands == ("int8", "int8") for product in spy.seen), "quantized layers run in their format"


@pytest.mark.parametrize("broken", ["activated", "with_residual"])
def test_layers_that_run_otherwise_through_the_gate_run_their_own_code(comfy, wan, call, monkeypatch, checked, broken):
    """Each picture stays right on a core that means something else by what the gate folds."""
    with next_core.installed():
        monkeypatch.setattr(gate, broken, lambda x, folded: x[..., : self_test.SIZE])
        checked()
        assert gate.UNEQUAL.keys() >= {"", "int8_tensorwise"}
        assert "returns another result through Halfsafe" in gate.UNEQUAL[""]
        reference = families.replay(load(comfy, wan, "fp32", "fp32"), call)
        for storage, compute in (("fp16", "fp16_safe"), ("fp8_e4m3fn", "fp8"), ("int8", "int8")):
            assert relative_error(reference, families.replay(load(comfy, wan, storage, compute), call)) < 0.06
        assert gate.UNEQUAL[""] in families.report(comfy, load(comfy, wan, "fp16", "fp16_safe"))["notes"]


@pytest.mark.parametrize(
    ("place", "function", "kind"),
    [
        (bound, "quantize_per_tensor_fp8", "float8_e4m3fn"),
        (bound, "int8_linear", "int8_tensorwise"),
        (kernels, "dequantize_per_tensor_fp8", "float8_e4m3fn"),
        (kernels, "dequantize_int8_simple_dtype", "int8_tensorwise"),
    ],
)
def test_a_wrong_kernel_that_calls_would_run_is_seen(monkeypatch, checked, place, function, kind):
    """ComfyUI's own forward finds its kernels elsewhere; those that are bound to a layer are the ones compared."""
    find = kernels.kernel_that_takes

    def wrong(name, **arguments):
        kernel = find(name, **arguments)
        return kernel if name != function else Halved(kernel)

    monkeypatch.setattr(place, "kernel_that_takes", wrong)
    monkeypatch.setattr(kernels, "_unpacking", {})
    checked()
    assert gate.UNEQUAL.keys() == {kind} and kind in gate.UNEQUAL[kind], f"{function} is wrong: {gate.UNEQUAL}"


def test_a_layer_that_raises_is_left_alone(monkeypatch, checked):
    with next_core.installed():
        monkeypatch.setitem(comfy.ops.INPUT_ACT_EAGER, "unheard_of", lambda x: x @ torch.zeros(3, 3))
        checked()
    assert "unheard_of: RuntimeError" in next(iter(gate.UNEQUAL.values()))


def test_a_norm_and_an_attention_that_do_not_ask_us_are_told(monkeypatch, checked):
    monkeypatch.setattr(
        comfy.ldm.modules.attention, "attention_pytorch", comfy.ldm.modules.attention.attention_pytorch.__wrapped__
    )
    norm = comfy.ops.disable_weight_init.LayerNorm
    plain = norm.forward_comfy_cast_weights

    def doubled(self, input):
        return 2 * plain(self, input)

    doubled.__module__ = "comfy.ops"
    monkeypatch.setattr(norm, "forward_comfy_cast_weights", doubled)
    checked()
    assert [*gate.UNEQUAL] == [gate.NORM, self_test.ATTENTION]
    assert "settings of attention have no effect" in gate.UNEQUAL[self_test.ATTENTION]
    assert uncast_norm(a_layer("LayerNorm")[0]) == [] and uncast_norm(a_layer("GroupNorm")[0]) == []
