"""Run the cases of `compose` by the nodes' own functions, and judge each by ComfyUI alone in fp32 with the same graph, and by its own report.

A case is right if its latent is within the bound of the reference, and its report is what a spy on the products saw. The bound is `FACTOR` times the error of
ComfyUI alone, in the same graph, with the weights as the storage holds them, and in the compute's dtype. What has to act (a LoRA, a merge, foreign code) moves
the reference by more than `ACTS` bounds (`is_blind`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import comfy.ldm.modules.attention as attention
import comfy.model_management as management
import comfy.sample
import comfy.samplers
import comfy.sd
import folder_paths
import torch
from comfy.quant_ops import QuantizedTensor
from comfy_extras import nodes_hooks, nodes_lora_debug, nodes_model_merging
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.guard.verdicts import NonFinite
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import dialects, families, model_files, packed_layers, tiny_models
from support.compose import NODES, OURS, Case
from support.custom_nodes import own_layers
from support.custom_nodes.step_caches import PACKS, ip_adapter
from support.guarding import left_on
from support.matmul_spy import MatmulSpy, differences
from support.measures import relative_error
from support.summing import SETTINGS, states

PLAIN = {"lora": "none", "merge": "none", "foreign": "none"}
FACTOR, ACTS, FLOOR = 3.0, 1.2, 2e-3
STEPS = 2
CHANGED = 0.4
"""A LoRA's strength in the second prompt, of 1."""


class Family(NamedTuple):
    """``text``, ``pooled``: widths. ``block``: the module that foreign code is put on, and ``width`` of its result. ``loud``: as in `families.OVERFLOWS`."""

    write: Callable
    text: int
    block: str
    width: int
    loud: dict[str, float]
    lora: float
    pooled: int = 0


def _wan(path: Path, seed: int = 0) -> Path:
    return tiny_models.wan(path, dim=128, blocks=1, ffn=256, seed=seed)


FAMILIES = {
    "wan": Family(_wan, 4096, "blocks.0", 128, families.OVERFLOWS["wan"]["ffn"], 0.5),
    "sd15": Family(
        functools.partial(tiny_models.narrow_sd15, up=0), 768, "middle_block.1.transformer_blocks.0", 64, families.OVERFLOWS["sdxl"]["ffn"], 0.25
    ),
    "flux": Family(
        functools.partial(tiny_models.flux, hidden=128), 4096, "double_blocks.0", 128, families.OVERFLOWS["flux"]["ffn"], 0.5, 768
    ),
    "lumina2": Family(functools.partial(tiny_models.lumina2, layers=1, refiners=1, heads=1), 2304, "layers.0", 128, families.OVERFLOWS["z_image"]["ffn"], 0.5),
}  # fmt: skip


class Outcome(NamedTuple):
    """``kind``: right, refused, refused by ComfyUI too, or wrong."""

    kind: str
    text: str = ""


class Wrong(Exception):
    """A case is not right, and why."""


class Composer:
    """Runs cases. Files, references and the models of references are made once and kept; a case loads its own."""

    def __init__(self, comfy: SimpleNamespace, models: Path):
        self.comfy, self.models = comfy, models
        self.file, self.lora = functools.cache(self._file), functools.cache(self._lora)
        self._stock = functools.cache(self.of_core)
        self._latents: dict[tuple, torch.Tensor] = {}

    # files

    def _file(
        self,
        family: str,
        weights: str,
        storage: str = "as_file",
        whole: bool = False,
        seed: int = 0,
        rounded: bool = False,
    ) -> Path:
        """The model of a family, or a checkpoint that holds nothing else, whose blocks another tool stored in ``storage``. ``rounded``: the numbers of those in fp32."""
        folder = self.models / ("checkpoints" if whole else "diffusion_models")
        path = folder / f"composed_{family}_{weights}_{storage}_{seed}{'_rounded' * rounded}.safetensors"
        if rounded:
            self._rounded(self.file(family, weights), self.file(family, weights, storage), path)
        elif whole:
            plain = self.file(family, weights, storage, seed=seed)
            tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(plain).items()}
            save_file(tensors, path, families.metadata_of(plain))
        elif storage != "as_file":
            self._in_storage(self.file(family, weights, seed=seed), path, storage)
        elif weights == "overflowing":
            families.write_scaled(self.file(family, "in_range", seed=seed), path, FAMILIES[family].loud)
        else:
            FAMILIES[family].write(path, seed=seed)
        return path

    def _in_storage(self, source: Path, target: Path, storage: str) -> None:
        tensors, metadata = load_file(source), families.metadata_of(source)
        layers = [name.removesuffix(".weight") for name in tensors if _is_layer(name, tensors[name])]
        weights = {layer: tensors.pop(f"{layer}.weight").float() for layer in layers}
        if storage.startswith("fp8"):
            dialects.comfy_quant(target, weights, {}, dtype=getattr(torch, f"float8_{storage.removeprefix('fp8_')}"))
        else:
            dialects.in_format(target, weights, {}, storage)
        save_file(tensors | load_file(target), target, metadata)

    def _rounded(self, source: Path, stored: Path, target: Path) -> None:
        held = self.of_core(stored).model.diffusion_model.named_modules()
        layers = {
            name: module.weight for name, module in held if isinstance(getattr(module, "weight", None), QuantizedTensor)
        }
        assert layers, stored
        numbers = {f"{name}.weight": weight.dequantize().float() for name, weight in layers.items()}
        save_file({**load_file(source), **numbers}, target, families.metadata_of(source))

    def _lora(self, family: str, seed: int) -> str:
        tensors = load_file(self.file(family, "in_range"))
        layers = {name.removesuffix(".weight"): tuple(t.shape) for name, t in tensors.items() if _is_layer(name, t)}
        path = self.models / "loras" / f"composed_{family}_{seed}.safetensors"
        save_file(model_files.lora(layers, size=FAMILIES[family].lora, seed=seed), path)
        return path.name

    # graphs

    def rules(self, case: Case):
        if case["rules"] == "default":
            return None
        text = f"{FAMILIES[case['family']].block}.* storage=as_file compute=fp32"
        return self.comfy.run("HalfsafeLayerRules", rules=text, preset="none")[0]

    def loaded(self, case: Case):
        """The first node of the graph: a loader."""
        stored = case["storage"] if case["stored_by"] == "file" else "as_file"
        whole, ours = "checkpoint" in case["source"], case["source"] in OURS
        path = self.file(case["family"], case["weights"], stored, whole)
        if ours:
            storage = case["storage"] if case["stored_by"] == "loader" else "as_file"
            compute = "auto" if "C" in case["nodes"] else case["compute"]
            given = {"storage": storage, "compute": compute, "rules": self.rules(case)}
            if whole:
                given |= {"ckpt_name": path.name, "clip_storage": "auto", "vae_dtype": "auto"}
                return self.comfy.run("HalfsafeLoadCheckpoint", **given)[0]
            return self.comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, **given)[0]
        return self.of_core(path, case["source"] == "packed")

    def of_core(self, path: Path, packed: bool = False):
        """The model of a file by ComfyUI's own loader."""
        if path.parent.name == "checkpoints":
            return self.comfy.core["CheckpointLoaderSimple"]().load_checkpoint(path.name)[0]
        if path.parent.name == "diffusion_models" and path.parent.parent == self.models:
            model = self.comfy.core["UNETLoader"]().load_unet(path.name, "default")[0]
        else:
            model = comfy.sd.load_diffusion_model(str(path))
        if packed:
            packed_layers.pack(model.model.diffusion_model)
            model.__class__ = packed_layers.HangingPatcher
        return model

    def graph(self, case: Case, model, ours: bool, strength: float = 1.0, reference: bool = False):
        """The nodes behind a loader; without those of this pack, but with ComfyUI's own compute dtype in their place unless it is a reference."""
        model = self._around(case, model, "before", strength)
        for letter in case["nodes"] if case["nodes"] != "none" else "":
            if ours:
                model = self._node(case, model, letter)
            elif letter == "C" and not reference:
                model = self._in_compute(case, model.clone())
        return self._around(case, model, "behind", strength)

    def _around(self, case: Case, model, side: str, strength: float):
        if case["lora"] in (side, "both"):
            name = self.lora(case["family"], 5 if side == "before" else 6)
            model = self.comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, name, strength)[0]
        return self.unsaved(case, self._merged(case, model), strength) if case["side"] == side else model

    def _merged(self, case: Case, model):
        if case["merge"] == "none":
            return model
        other = self.of_core(self.file(case["family"], case["weights"], seed=3))
        with _read_once(model.model):
            if case["merge"] == "whole":
                return nodes_model_merging.ModelMergeSimple().merge(model, other, 0.5)[0]
            ratios = {"input": 1.0, FAMILIES[case["family"]].block: 0.3}
            return nodes_model_merging.ModelMergeBlocks().merge(model, other, **ratios)[0]

    def unsaved(self, case: Case, model, strength: float = 1.0):
        """What a saved file does not hold: a LoRA in bypass mode and code of other packs."""
        if case["lora"] == "bypass":
            node = nodes_lora_debug.LoraLoaderBypassModelOnly()
            model = node.load_lora_model_only(model, self.lora(case["family"], 5), strength)[0]
        return FOREIGN[case["foreign"]](model, FAMILIES[case["family"]]) if case["foreign"] in FOREIGN else model

    def _in_compute(self, case: Case, model):
        """The same model, computing in the case's dtype where ComfyUI has it."""
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        if case["compute"] in dtypes:
            model.set_model_compute_dtype(dtypes[case["compute"]])
        return model

    def _node(self, case: Case, model, letter: str):
        given: dict = {"model": model}
        if letter == "H":
            storage = case["storage"] if case["stored_by"] == "halfsafe" else "as_file"
            given |= {"goal": case["goal"], "guard": case["on_nan"], "check": case["check"]}
            given |= {"storage": "as loaded" if storage == "as_file" else storage, "rules": self.rules(case)}
        elif letter == "G":
            given |= {"on_nan": case["on_nan"], "max_retries": 8, "check": case["check"]}
        elif letter == "C":
            given |= {"compute": case["compute"], "rules": self.rules(case)}
        else:
            given |= dict(zip(SETTINGS, ("auto", "on", "on", "auto", "auto"), strict=True))
        return self.comfy.run(NODES[letter], **given)[0]

    def conditioning(self, case: Case, strength: float = 1.0) -> list:
        family, generator = FAMILIES[case["family"]], torch.Generator().manual_seed(1)
        extra = {"pooled_output": torch.randn(1, family.pooled, generator=generator)} if family.pooled else {}
        extra["guidance"] = 4.0  # Flux multiplies it by 1000, which bf16 has no exact number for at 3.5
        cond = [[torch.randn(1, 8, family.text, generator=generator), extra]]
        if not case["lora"].startswith("hook"):
            return cond
        (hooks,) = nodes_hooks.CreateHookLoraModelOnly().create_hook_model_only(self.lora(case["family"], 5), strength)
        if case["lora"] == "hook_keyframes":
            (first,) = nodes_hooks.CreateHookKeyframe().create_hook_keyframe(0.3, 0.0)
            (both,) = nodes_hooks.CreateHookKeyframe().create_hook_keyframe(1.0, 0.5, first)
            (hooks,) = nodes_hooks.SetHookKeyframes().set_hook_keyframes(hooks, both)
        return nodes_hooks.ConditioningSetProperties().set_properties(cond, 1.0, "default", hooks=hooks)[0]

    def sample(self, case: Case, model, strength: float = 1.0) -> torch.Tensor:
        """The latent of ComfyUI's KSampler, or of a pack's sampler that computes in float64."""
        cond, noise = self.conditioning(case, strength), families.noise(model)
        wide = case["foreign"] == "float64"
        sampler = comfy.samplers.KSAMPLER(own_layers.in_float64) if wide else comfy.samplers.ksampler("euler")
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
        zeros = torch.zeros_like(noise)
        return comfy.sample.sample_custom(
            model, noise, 1.0, sampler, sigmas, cond, cond, zeros, disable_pbar=True, seed=1
        )

    # references

    def alone(
        self, case: Case, dtype: torch.dtype, storage: str = "as_file", strength: float = 1.0, **changes: str
    ) -> torch.Tensor:
        """The latent of ComfyUI alone with the same graph in ``dtype``, its weights as ``storage`` holds them."""
        case = {**case, **changes}
        packed = case["source"] == "packed"
        side = case["side"] if case["merge"] != "none" or case["foreign"] in STATING else ""
        key = (*(case[name] for name in ("family", "weights", "lora", "merge", "foreign")), packed, side, dtype, storage, strength)  # fmt: skip
        if key not in self._latents:
            with on_card("cpu"):
                path = self.file(case["family"], case["weights"], storage, rounded=storage != "as_file")
                model = self._stock(path, packed).clone()
                model.set_model_compute_dtype(dtype)
                self._latents[key] = self.sample(case, self.graph(case, model, False, strength, True), strength)
        return self._latents[key]

    def bound(self, case: Case, graph: Case, strength: float = 1.0) -> float:
        """`FACTOR` times what storage and compute cost ComfyUI alone in a graph; twice the storage where a rounded weight is merged and rounded again."""
        right = self.alone(graph, torch.float32, strength=strength)

        def error(dtype: torch.dtype, storage: str = "as_file") -> float:
            return relative_error(right, self.alone(graph, dtype, storage, strength))

        again = case["merge"] != "none" or case["end"] in ("save", "convert")
        stored = 0.0 if case["storage"] == "as_file" else error(torch.float32, case["storage"]) * (1 + again)
        return FACTOR * (stored + max(self._errors_of_compute(case, error))) + FLOOR

    def _errors_of_compute(self, case: Case, error: Callable[..., float]) -> Iterator[float]:
        for compute in {case["compute"]} | ({"fp8", "int8"} if case["goal"] == "speed" else set()):
            if compute in ("fp8", "int8"):
                yield error(torch.float32, {"fp8": "fp8_e4m3fn", "int8": "int8"}[compute])
        patched = case["lora"] != "none" or case["merge"] != "none"  # weights of 16 bit, rounded again
        in_fp32 = case["compute"] == "fp32" and "H" not in case["nodes"] and not patched
        yield 0.0 if in_fp32 else error(torch.bfloat16)

    # judging

    def judge(self, case: Case) -> Outcome:
        """Run a case and tell what became of it."""
        before = states()
        try:
            with on_card(case["device"]), torch.inference_mode():
                text = self._run(case)
            if states() != before:
                raise Wrong("torch's flags are not as they were")
            return Outcome("right", text)
        except Wrong as wrong:
            return Outcome("wrong", str(wrong))
        except HalfsafeError as error:
            fault = isinstance(error, NonFinite) and not self._may_overflow(case)
            return Outcome("wrong" if fault else "refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return self._also_refused_by_comfyui(case, error)
        finally:
            management.unload_all_models()
            management.cleanup_models()

    def _also_refused_by_comfyui(self, case: Case, error: Exception) -> Outcome:
        text = f"{type(error).__name__}: {error} at {_place(error)}"
        try:
            with on_card(case["device"]), torch.inference_mode():
                model = self.loaded({**case, "source": _of_core(case["source"])})
                if "C" not in case["nodes"]:
                    self._in_compute(case, model)
                self.sample(case, self.graph(case, model, False))
        except Exception as same:
            if type(same) is type(error):
                return Outcome("refused by ComfyUI too", text)
        return Outcome("wrong", text)

    def _run(self, case: Case) -> str:
        loaded = self.loaded(case)
        model = self.graph(case, loaded, True)
        with last_call_of(model.model.diffusion_model) as spy:
            found = self.sample(case, model)
        report = families.report(self.comfy, model)
        text = self._compared(case, "sample", found, verdict=report["guard"]["verdict"])
        self._check_report(case, report, model, spy)
        if case["end"] == "second_prompt":
            text += self._compared(case, "the same nodes again", self.sample(case, model))
            changed = self.graph(case, loaded, True, CHANGED)
            text += self._compared(case, "changed strength", self.sample(case, changed, CHANGED), CHANGED)
        elif case["end"] == "unload":
            families.unload_models()
            text += self._compared(case, "after unloading", self.sample(case, model))
            model.partially_unload(model.offload_device, model.model_size() // 2)
            text += self._compared(case, "half unloaded", self.sample(case, model))
        elif case["end"] in ("save", "convert"):
            path = self._saved(case, model)
            with on_card("cpu"):
                again = self.of_core(path)
                again.set_model_compute_dtype(torch.float32)
                text += self._compared(case, case["end"], self.sample(case, self.unsaved(case, again)))
        left = {name for name, own in left_on(model.model).items() if "forward" in own}
        if left and case["lora"] != "bypass" and case["foreign"] not in ("block", "injected", "teacache"):
            raise Wrong(f"a forward is left on {sorted(left)}")
        return text

    def _saved(self, case: Case, model) -> Path:
        """The file of Save Model, or what `convert` makes of it."""
        storage = case["storage"] if case["stored_by"] == "end" else "as_file"
        node = self.comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
        (name,) = node.execute(
            model, "composed", "as_file" if case["end"] == "convert" else storage, self.rules(case)
        ).args
        path = Path(folder_paths.get_output_directory()) / name
        if case["end"] == "convert":
            path = Path(
                convert_file(
                    path, path.with_name(f"converted_{path.name}"), storage, self.rules(case) or rules_from()
                ).target
            )
        return path

    def _compared(self, case: Case, when: str, found: torch.Tensor, strength: float = 1.0, verdict: str = "") -> str:
        error = relative_error(self.alone(case, torch.float32, strength=strength), found)
        bound = self.bound(case, {**case, **PLAIN})
        if not error <= bound:
            bound = max(bound, self.bound(case, case, strength))
        if error <= bound:
            return f"{when}: {error:.4f} of {bound:.4f}; "
        if when not in ("save", "convert") and self._may_overflow(case):
            return f"{when}: as ComfyUI; "
        told = f"; verdict {verdict}" if verdict else ""
        lost = self._nearest(case, found, bound, strength)
        raise Wrong(f"{when}: error {error:.4f}, bound {bound:.4f}{told}{lost}")

    def _may_overflow(self, case: Case) -> bool:
        """Whether plain fp16 is asked for, or ComfyUI's own, and is wrong in ComfyUI alone too, and no guard is to repeat."""
        guarded = {*"GH"} & {*case["nodes"]} and case["on_nan"] == "retry_higher"
        own = case["compute"] == "auto" and case["source"] not in OURS and not {*"CH"} & {*case["nodes"]}
        if case["weights"] != "overflowing" or guarded or not (own or case["compute"] == "fp16"):
            return False
        error = relative_error(self.alone(case, torch.float32), self.alone(case, torch.float16))
        return not error <= self.bound(case, case)

    def _nearest(self, case: Case, found: torch.Tensor, bound: float, strength: float) -> str:
        """What of the graph was lost, if the latent is that of the graph without it."""
        for factor in ("lora", "merge", "foreign"):
            for value in {"none", *(("before", "behind") if case[factor] == "both" else ())} - {case[factor]}:
                without = self.alone(case, torch.float32, strength=strength, **{factor: value})
                if relative_error(without, found) < bound:
                    return f"; it is that of {factor}={value}"
        return ""

    def _check_report(self, case: Case, report: dict, model, spy: MatmulSpy) -> None:
        """``spy``: what the last call of the sampler's run multiplied."""
        verdict = report["guard"]["verdict"]
        cured = {"recovered", "stopped"} if case["weights"] == "overflowing" else set()
        if verdict not in {"clean", "off"} | cured or (verdict == "stopped" and not self._may_overflow(case)):
            raise Wrong(f"verdict {verdict}: {[event['kind'] for event in report['guard']['events']]}")
        self._check_storages(report, model)
        inside = case["lora"] == "bypass" or (case["source"] == "packed" and case["lora"] != "none")
        measured = "cache" in case["foreign"] or case["lora"] == "hook_keyframes" or self._may_overflow(case)
        if inside or measured:  # a LoRA's products are made inside of its layer; the last call measures
            return
        if found := differences(report["layers"], spy):
            raise Wrong(f"the report: {found[0]}, and {len(found) - 1} more")

    def _check_storages(self, report: dict, model) -> None:
        modules = dict(model.model.diffusion_model.named_modules())
        for layer in report["layers"]:
            weight = modules[layer["name"]].weight
            held = HELD.get(getattr(weight, "_layout_cls", None)) or HELD.get(weight.dtype)
            if held and held != layer["storage"]:
                raise Wrong(f"the report: {layer['name']} is stored in {layer['storage']}, it is {held}")

    def is_blind(self, case: Case) -> str:
        """What does not move the reference by more than `ACTS` bounds."""
        right, limit = self.alone(case, torch.float32), ACTS * self.bound(case, case)
        parts = {"lora": ["none"], "merge": ["none"], "foreign": ["none"]} | ({"lora": ["before", "behind"]} if case["lora"] == "both" else {})  # fmt: skip
        small = []
        for factor, values in parts.items():
            for value in values if case[factor] != "none" and case[factor] != "float64" else ():
                if (moved := relative_error(right, self.alone(case, torch.float32, **{factor: value}))) < limit:
                    small.append(f"{factor} {moved:.3f} < {limit:.3f}")
        return ", ".join(small)


HELD = {
    "TensorCoreFP8E4M3Layout": "fp8_e4m3fn", "TensorCoreFP8E5M2Layout": "fp8_e5m2", "TensorWiseINT8Layout": "int8",
    "TensorCoreNVFP4Layout": "nvfp4", "TensorCoreMXFP8Layout": "mxfp8", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
}  # fmt: skip


def _is_layer(name: str, tensor: torch.Tensor) -> bool:
    return bool(re.search(r"(blocks?|layers)\.", name)) and tensor.dim() == 2 and name.endswith(".weight") and not any(size % 32 for size in tensor.shape) and "attn2.to_k" not in name  # fmt: skip


@contextlib.contextmanager
def last_call_of(module: torch.nn.Module) -> Iterator[MatmulSpy]:
    """A spy on the products of a model's last call. It is on in the calls alone: what is around them is not to run under a mode."""
    spy = MatmulSpy(module)
    del spy.names[module]

    def begin(*_):
        spy.seen.clear()
        spy.__enter__()

    with contextlib.ExitStack() as held:
        held.callback(module.register_forward_pre_hook(begin).remove)
        held.callback(module.register_forward_hook(lambda *_: spy.__exit__(None, None, None), always_call=True).remove)
        yield spy


@contextlib.contextmanager
def _read_once(model: torch.nn.Module) -> Iterator[None]:
    """ComfyUI's merges make the whole state dict for each weight, half of a case's time."""
    with mock.patch.object(model, "state_dict", functools.cache(model.state_dict)):
        yield


def _of_core(source: str) -> str:
    return {"ours": "core", "our_checkpoint": "core_checkpoint"}.get(source, source)


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if re.search("/(nodes|precision)/", frame.filename)]  # fmt: skip
    return " <- ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (ours[-1:] + frames[-1:])[::-1])


FOREIGN = {
    "wrapper": lambda model, family: own_layers.wrapper(model),
    "attn2": lambda model, family: ip_adapter(model, own_layers.stated_dtype(model)),
    "block": lambda model, family: own_layers.block(model, family.block, family.width),
    "injected": lambda model, family: own_layers.injected(model, family.block, family.width),
    "teacache": lambda model, family: PACKS["TeaCache"](model),
    "magcache": lambda model, family: PACKS["MagCache"](model),
    "cache_dit": lambda model, family: PACKS["CacheDiT"](model),
}
STATING = ("attn2", "block", "injected")


# the device

OWN = management.should_use_fp16, management.should_use_bf16


@functools.cache
def _attentions() -> tuple[tuple[object, str], ...]:
    names = ("optimized_attention", "optimized_attention_masked")
    modules = [module for name, module in sys.modules.items() if name.startswith("comfy.ldm.")]
    return tuple((module, name) for module in modules for name in names if hasattr(module, name))


@contextlib.contextmanager
def on_card(profile: str) -> Iterator[None]:
    """ComfyUI and the pack decide as on a device; an NVIDIA card's attention is torch's, and its default dtype that of ComfyUI there."""
    fp16, bf16 = OWN if profile == "cpu" else (lambda *args, **kwargs: True, lambda *args, **kwargs: profile != "sm_75")
    with contextlib.ExitStack() as held:
        held.enter_context(mock.patch.dict(os.environ, HALFSAFE_DEVICE_PROFILE=profile))
        held.enter_context(mock.patch.object(management, "should_use_fp16", fp16))
        held.enter_context(mock.patch.object(management, "should_use_bf16", bf16))
        for module, name in _attentions():
            held.enter_context(mock.patch.object(module, name, attention.attention_pytorch))
        yield
