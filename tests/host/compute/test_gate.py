"""The ComfyUI after 0.39, which folds an activation and a residual into a layer's call: each setting is as near to fp32 there as on the pinned one."""

from __future__ import annotations

import contextlib
import functools
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui import gate
from halfsafe.nodes.host.comfyui.layer_forward import LayerForward
from halfsafe.nodes.host.comfyui.layers import modules_of
from halfsafe.nodes.host.compute.bound import Int8Linear
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files, next_core, tiny_models
from support.bound_layers import note_bound
from support.families import load
from support.guarding import guarded, inside, report_of
from support.matmul_spy import Products
from support.measures import relative_error
from support.model_files import WAN_LINEARS
from support.summing import accumulation

FFN = {f"blocks.{block}.ffn.2": (256, 1024) for block in (0, 1)}


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def lora():
    return model_files.lora(FFN, rank=8)


def with_lora(model, lora):
    return load_lora_for_models(model, None, dict(lora), 4.0, 0.0)[0]


SETTINGS = {
    "fp32": lambda comfy, path, lora: load(comfy, path, "fp32", "fp32"),
    "fp16_safe": lambda comfy, path, lora: load(comfy, path, "fp16", "fp16_safe"),
    "bf16": lambda comfy, path, lora: load(comfy, path, "bf16", "bf16"),
    "fp16 sums": lambda comfy, path, lora: accumulation(
        comfy, load(comfy, path, "fp16", "fp16"), fp16_accumulation="on"
    ),
    "fp8 in bf16": lambda comfy, path, lora: load(comfy, path, "fp8_e4m3fn", "bf16"),
    "fp8 in fp8": lambda comfy, path, lora: load(comfy, path, "fp8_e4m3fn", "fp8"),
    "fp8 in fp16_safe": lambda comfy, path, lora: load(comfy, path, "fp8_e4m3fn", "fp16_safe"),
    "int8 in int8": lambda comfy, path, lora: load(comfy, path, "int8", "int8"),
    "int8 in fp16_safe": lambda comfy, path, lora: load(comfy, path, "int8", "fp16_safe"),
    "LoRA beside int8": lambda comfy, path, lora: with_lora(load(comfy, path, "int8", "int8"), lora),
    "LoRA beside fp8": lambda comfy, path, lora: with_lora(load(comfy, path, "fp8_e4m3fn", "bf16"), lora),
    "LoRA in fp16_safe": lambda comfy, path, lora: with_lora(load(comfy, path, "fp16", "fp16_safe"), lora),
}


def errors_of(comfy, path, lora, call, setting: str) -> list[float]:
    """The relative errors to fp32 of the first and the second call."""
    exact = load(comfy, path, "fp32", "fp32")
    exact = with_lora(exact, lora) if "LoRA" in setting else exact
    reference = families.replay(exact, call)
    model = SETTINGS[setting](comfy, path, lora)
    return [relative_error(reference, families.replay(model, call)) for _ in range(2)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_is_as_near_to_fp32_as_on_the_pinned_core(comfy, wan, call, lora, setting):
    pinned = errors_of(comfy, wan, lora, call, setting)
    with next_core.installed():
        following = errors_of(comfy, wan, lora, call, setting)
    print(f"{setting}: pinned {pinned}, next {following}")
    assert all(after <= 1.1 * before + 1e-5 for before, after in zip(pinned, following, strict=True))


def test_a_guarded_model_that_overflows_ends_as_on_the_pinned_core(comfy, overflowing, call):
    reference = families.replay(load(comfy, overflowing, "fp32", "fp32"), call)
    seen = {}
    for name, core in {"pinned": contextlib.nullcontext(), "next": next_core.installed()}.items():
        with core:
            model = guarded(comfy, load(comfy, overflowing, "fp16", "fp16"))
            result = families.replay(model, call)
            guard = report_of(model)
        seen[name] = SimpleNamespace(
            error=relative_error(reference, result),
            verdict=guard.verdict,
            layers={event.layer for event in guard.events},
        )
    print(seen)
    assert seen["next"].error <= 1.1 * seen["pinned"].error + 1e-5
    assert (seen["next"].verdict, seen["next"].layers) == (seen["pinned"].verdict, seen["pinned"].layers)


def test_a_folded_activation_sees_the_fp32_of_a_wide_stream(comfy, wan, call, monkeypatch):
    given = []
    activated = gate.activated
    monkeypatch.setattr(gate, "activated", lambda x, folded: given.append(x.dtype) or activated(x, folded))

    def modes() -> dict[str, str]:
        model = load(comfy, wan, "fp16", "fp16_safe", rules=rules_from(text="*ffn.0 stream=fp32"))
        families.replay(model, call)
        given.clear()
        with Products({name: model.model.diffusion_model.get_submodule(name) for name in FFN}) as products:
            families.replay(model, call)
        return products.modes()

    pinned = modes()
    with next_core.installed():
        assert modes() == pinned
    assert len(given) >= len(FFN) and set(given) == {torch.float32}


def test_an_int8_layer_of_which_nothing_is_changed_keeps_the_fused_kernel(comfy, wan, call, monkeypatch):
    """In int8 with a 16-bit stream a call with a folded activation runs ComfyUI's own forward, and each other the layer's bound product."""
    with next_core.installed():
        model = load(comfy, wan, "int8", "auto")
        fused: list[torch.nn.Module] = []
        cls = type(model.model.diffusion_model.get_submodule(next(iter(FFN))))
        own = cls.forward

        @functools.wraps(own)
        def forward(self, input, *args, **kwargs):
            fused.extend([self] if args or kwargs else [])
            return own(self, input, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", forward)
        alone = note_bound(monkeypatch, Int8Linear)
        families.replay(model, call)
        names = {module: name for name, module in modules_of(model.model).items()}
    assert {names[module] for module in fused} >= set(FFN)
    assert {names[module] for module in alone} == set(WAN_LINEARS) - set(FFN)


def test_calibration_sums_what_the_layer_multiplies(comfy, models_dir):
    """The sums of squares of each layer's inputs, next core and pinned."""
    path = tiny_models.wan(models_dir / "diffusion_models" / "calibrated_next.safetensors", dim=128, ffn=512)

    def sums() -> dict[str, torch.Tensor]:
        model = load(comfy, path, "as_file", "fp32")
        latent = {"samples": torch.zeros_like(families.noise(model, size=8))}
        found, _ = comfy.run(
            "HalfsafeCalibrate", model=model, latent_image=latent, positive=families.conditioning("wan"), seed=1
        )
        return {name: products.blocks for name, products in found.layers.items()}

    pinned = sums()
    with next_core.installed():
        following = sums()
    assert following.keys() == pinned.keys()
    errors = {name: relative_error(pinned[name], following[name]) for name in pinned}
    assert max(errors.values()) < 1e-4, errors


def test_analysis_measures_what_the_layer_multiplies(comfy, wan):
    """The SNR in dB of each layer of ``ffn.2``, next core and pinned."""

    def analysed() -> str:
        model = load(comfy, wan, "fp32", "fp32")
        latent = {"samples": torch.zeros_like(families.noise(model, size=8))}
        inputs = {
            "latent_image": latent,
            "positive": families.conditioning("wan"),
            "seed": 1,
            "candidate": "fp8_e4m3fn",
            "target_snr_db": 10.0,
        }
        return comfy.run("HalfsafeAnalyzeLayers", model=model, **inputs)[1]

    pinned = analysed()
    with next_core.installed():
        assert analysed() == pinned


@pytest.mark.parametrize(
    "given",
    [
        {"input_act": "gelu_tanh"},
        {"residual": 1.0},
        {"residual": 1.0, "residual_scale": 0.5},
        {"input_act": "rms_norm"},
    ],
)
def test_the_gate_computes_what_the_layer_itself_does(given):
    from comfy.ops import manual_cast

    with next_core.installed():
        layer = manual_cast.Linear(8, 8)
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
        x = torch.randn(3, 8)
        arguments = {
            name: torch.full((3, 8), value) if isinstance(value, float) else value for name, value in given.items()
        }
        if "rms_norm" in given.values():
            arguments["act_weight"] = manual_cast.RMSNorm(8, device="cpu", dtype=torch.float32)
            torch.nn.init.uniform_(arguments["act_weight"].weight)
        expected = layer(x, **arguments)
        entered = LayerForward(layer, functools.partial(type(layer).forward, layer)).entrance
        torch.testing.assert_close(entered(x, **arguments), expected)
        in_order = {name: arguments.get(name) for name in next_core.FOLDED}
        torch.testing.assert_close(entered(x, *in_order.values()), expected)


class OfAPack(torch.nn.Linear):
    """A layer of another pack, which means its own by a name of ComfyUI's and by its first place."""

    def forward(self, x, scale=1.0, residual=None):
        result = super().forward(x) * scale
        return result if residual is None else (result + residual).relu()


def test_a_layer_of_another_pack_keeps_what_it_means_by_names_and_places():
    layer, x = OfAPack(8, 8), torch.randn(3, 8)
    with next_core.installed():
        entered = LayerForward(layer, layer.forward).entrance
        torch.testing.assert_close(entered(x, 0.5, residual=x), layer(x, 0.5, residual=x))
        torch.testing.assert_close(entered(x, input_act="gelu_tanh"), layer(F.gelu(x, approximate="tanh")))


@pytest.mark.skipif(bool(os.environ.get("HALFSAFE_NEXT_CORE")), reason="the core under test folds")
def test_no_gate_is_put_on_in_a_core_that_folds_nothing():
    layer = OfAPack(8, 8)
    assert LayerForward(layer, layer.forward).entrance == layer.forward


def test_a_result_of_fp16_is_scaled_in_the_dtype_of_the_residual():
    result, residual = torch.full((2,), 3e4).half(), torch.ones(2)
    for scale in (4.0, torch.full((2,), 4.0).half()):
        assert gate.with_residual(result, {"residual": residual, "residual_scale": scale}).tolist() == pytest.approx(
            [1.2e5 + 1] * 2, rel=1e-3
        )


def test_an_argument_that_nobody_takes_is_named_with_its_layer(comfy, wan, call):
    named = r"Layer 'diffusion_model\.blocks\.0\.ffn\.2' is called with `unheard_of`"
    for core, error in (
        (contextlib.nullcontext(), pytest.raises((TypeError, HalfsafeError), match="unheard_of")),
        (next_core.installed(), pytest.raises(HalfsafeError, match=named)),
    ):
        with core:
            model = load(comfy, wan, "fp16", "fp16_safe")
            layer = model.model.diffusion_model.blocks[0].ffn[2]
            with error:
                families.replay(
                    inside(model, lambda *args, layer=layer: layer(torch.zeros(1, 1024), unheard_of=1)), call
                )
