"""A model in the most precise arithmetic there is here, but for the parts that keep their own: what a check runs."""

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import comfy.lora
import torch
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.attention_bounds import AttentionCall
from ....precision.arithmetic.linear import kind_of, multiplied
from ....precision.arithmetic.patching import Patch, patched
from ....precision.guard.drift import CastsToFp32
from ....precision.guard.policy import ALL_IN_FP32, Escalation, span_of
from ....precision.modes import FP32
from ....precision.plan.compute import ComputeDecision, ComputePlan
from ..facts.layers import matrix_layers, top_level_parts
from ..lora.patcher import kept_beside
from ..lora.patches import DIFFUSION_MODEL
from ..run.accumulation import accumulation_of
from ..run.attention import forward_of, full_precision_attention
from ..run.call import Call
from ..run.compute import compute_of
from ..run.modules import dequantized, only_multiplies, weights_of
from .escalation import EscalatedLayers
from .state import Guarded

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher

GUIDANCE_FACTOR = 1000.0


class PreciseLayers(EscalatedLayers):
    """One model in fp32 between and in its layers, core's own attention included.

    Args:
        own: the blocks that keep their arithmetic; None for a model that is in fp32 as a whole, its code between blocks too.
        alone: layers of those blocks that run in fp32 all the same, and return the dtype they were given.
        attention: so does the attention in those blocks.
    """

    def __init__(
        self, guarded: Guarded, model: "BaseModel", own: Collection[str] | None = None, alone: Collection[str] = (), attention: bool = False
    ):
        self._alone = frozenset(alone)
        self._own = frozenset(own or ())
        self._attention = attention
        self._exact = 0
        escalated = _escalated(guarded, model, own)
        super().__init__(*escalated)
        self.spans = {name: part for name, part in self.parts.items() if name in escalated[0].spans}

    def _plan(self, model: "BaseModel", escalation: Escalation, modes: dict[str, str]) -> ComputePlan:
        plan = super()._plan(model, escalation, modes)
        decision = ComputeDecision(FP32.name, "same", "exchanged by the check")
        return ComputePlan(plan.choice, {**plan.decisions, **dict.fromkeys(self._alone, decision)})

    def call(self, call: Call, observing: Sequence[Patch] = ()) -> torch.Tensor:
        """Make a call inside of whatever wrappers others have."""
        with CastsToFp32() if self.whole else contextlib.nullcontext():
            return super().call(call, observing)

    def _patches(self) -> list[Patch]:
        patches = super()._patches()
        forwards = {id(module): value for module, name, value in patches if name == "forward"}
        parts = [part for name, part in self.parts.items() if self._attention and name in self._own]
        return [*patches, *((part, "forward", self._attending(forwards.get(id(part), forward_of(part)))) for part in parts)]

    def _attending(self, forward: Callable) -> Callable:
        """A part's forward with its attention in fp32."""

        def run(*args, **kwargs):
            self._exact += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._exact -= 1

        return run

    def _span(self, name: str, forward: Callable) -> Callable:
        """A part's forward in fp32; as the guard runs it where the part keeps its arithmetic."""
        if name in self._own:
            return super()._span(name, forward)
        exact = self._attending(forward)

        def precise(*args, **kwargs):
            with CastsToFp32():
                return exact(*args, **kwargs)

        return super()._span(name, precise)

    def _attend(self, function: Callable, attention: Callable, q, k, v, heads, *args, **kwargs) -> torch.Tensor:
        if not (self.whole or self._exact):
            return super()._attend(function, attention, q, k, v, heads, *args, **kwargs)
        return AttentionCall(q, k, v, heads, args, kwargs).run_in(torch.float32, full_precision_attention(function)).to(q.dtype)


def _escalated(guarded: Guarded, model: "BaseModel", own: Collection[str] | None) -> tuple[Escalation, "BaseModel", dict[str, str]]:
    """The escalation, model and modes that EscalatedLayers are made of; what the guard has widened stays so in ``own`` too."""
    if own is None:
        return ALL_IN_FP32, model, guarded.modes
    present = guarded.escalation
    spans = top_level_parts(model.diffusion_model).keys() - own
    modes = {name: FP32.name if present.whole or span_of(name, spans) else mode for name, mode in guarded.modes.items()}
    kept = {name: mode for name, mode in present.layers.items() if not (present.whole or span_of(name, spans))}
    return Escalation(kept, frozenset(spans) | present.spans, present.stream or present.whole), model, modes


class MergedWeights:
    """The layers with LoRAs or other patches, of hooks too, merged into their weights, rounded to the dtype those have.

    ``modules``: layer -> module, and ``in_8_bit`` those whose weight is in 8 bits or less. Patches that Halfsafe adds beside
    8-bit weights are none of them.
    """

    def __init__(self, patcher: "ModelPatcher"):
        self._patcher = patcher
        beside, hooked = kept_beside(patcher), patcher.get_combined_hook_patches(patcher.current_hooks)
        keys = (patcher.patches.keys() - beside) | hooked.keys()
        self._patches = {key: [*patcher.patches.get(key, ()), *hooked.get(key, ())] for key in keys}
        layers = {f"{DIFFUSION_MODEL}{name}.weight": (name, module) for name, module in matrix_layers(patcher.model)}
        found = (layers[key] for key in layers if key in keys)
        self.modules = {name: module for name, module in found if _held(module) != torch.float32 and only_multiplies(module)}
        self.in_8_bit = [name for name, module in self.modules.items() if _held(module).itemsize == 1]

    def exact(self, layers: Collection[str]) -> list[Patch]:
        """What makes layers multiply by their weight in fp32 as it was before any patch, with its patches added."""
        return [self._patch(name, True) for name in self.modules if name in layers]

    def unpatched(self, layers: Collection[str]) -> list[Patch]:
        """The same of all layers, but for ``layers`` without their patches."""
        return [self._patch(name, name not in layers) for name in self.modules]

    def _patch(self, name: str, patched: bool) -> Patch:
        return self.modules[name], "forward", functools.partial(self._multiply, name, patched)

    def _multiply(self, name: str, patched: bool, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        module, key = self.modules[name], f"{DIFFUSION_MODEL}{name}.weight"
        weight = dequantized(self._unpatched(key, module).data.to(x.device)).float()
        if patched:
            weight = comfy.lora.calculate_weight(self._patches[key], weight, key, original_weights={key: [(weight.clone(),)]})
        with weights_of(module)(module, x.float(), torch.float32) as (_, bias):
            return multiplied(module, kind_of(module), x.float(), weight, bias, *args, **kwargs).to(x.dtype)

    def _unpatched(self, key: str, module: torch.nn.Module) -> torch.Tensor:
        """The weight before any patch: ComfyUI keeps it where it merged LoRAs, else where a hook changed it."""
        merged, hooked = self._patcher.backup.get(key), self._patcher.hook_backup.get(key)
        return merged.weight if merged else hooked[0] if hooked else module.weight


def _held(module: torch.nn.Module) -> torch.dtype:
    return getattr(module.weight, "_qdata", module.weight).dtype


@contextlib.contextmanager
def learning_apart(patcher: "ModelPatcher") -> Iterator[None]:
    """While the context lasts, the model's compute plan and accumulation measure for themselves: no later call depends on it."""
    compute, accumulation = compute_of(patcher), accumulation_of(patcher)
    fresh: list[tuple] = [(compute, "runs", type(compute)(compute.plan).runs)] if compute else []
    fresh += [(accumulation, "runs", type(accumulation)(accumulation.request).runs)] if accumulation else []
    with patched(fresh):
        yield


def without_step_cache(call: Call) -> Call:
    """A copy of the call with a latent of its own, past the wrappers that keep results of steps (EasyCache)."""
    copied = copy.copy(call)
    copied.x, copied._cache = call.x.clone(), None
    wrappers = dict(call.options.get("wrappers", {}))
    inner = wrappers.get(WrappersMP.DIFFUSION_MODEL, {})
    wrappers[WrappersMP.DIFFUSION_MODEL] = {key: [one for one in ones if not _keeps_steps(key, one)] for key, ones in inner.items()}
    copied.options = {**call.options, "wrappers": wrappers}
    return copied


def with_rounded_guidance(call: Call, dtype: torch.dtype) -> Call:
    """A copy of the call with its embedded guidance rounded as the model's own code rounds it, which it was made with.

    Flux and Hunyuan Video multiply it by 1000 in the dtype of the values between layers (``timestep_embedding`` in
    ``comfy/ldm/flux/layers.py``): 6.0 becomes 6016 in bf16.
    """
    copied, guidance = copy.copy(call), call.extra.get("guidance")
    if isinstance(guidance, torch.Tensor) and guidance.is_floating_point():
        copied.extra = {**call.extra, "guidance": (guidance.to(dtype) * GUIDANCE_FACTOR).float() / GUIDANCE_FACTOR}
    return copied


def _keeps_steps(key: str | None, wrapper: object) -> bool:
    return "cache" in f"{key} {getattr(wrapper, '__qualname__', type(wrapper).__qualname__)}".lower()
