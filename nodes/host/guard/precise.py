"""Run a model in the most precise arithmetic there is here, but for the parts that keep their own, for a check."""

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import comfy.lora
import torch
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.attention_bounds import AttentionCall
from ....precision.arithmetic.linear import kind_of, multiplied
from ....precision.arithmetic.patching import Patch, patched
from ....precision.guard.drift import CastsToFp32
from ....precision.guard.localize import stored
from ....precision.guard.policy import ALL_IN_FP32, Escalation, block_of
from ....precision.modes import FP32
from ....precision.plan.compute import ComputeDecision
from ..facts.layers import DIFFUSION_MODEL, matrix_layers, top_level_parts
from ..lora.merging import unpatched
from ..lora.patcher import unmerged_keys
from ..run.accumulation import accumulation_of
from ..run.attention import full_precision_attention
from ..run.call import Call
from ..run.compute import compute_of
from ..run.modules import dequantized, only_multiplies, weights_of
from .escalation import EscalatedLayers
from .state import Guarded

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher

GUIDANCE_FACTOR = 1000.0


class ExactParts:
    """The parts of a model that a check runs in fp32, core's own attention included; the others keep their arithmetic.

    Args:
        own: the blocks that keep theirs; None for a model that is in fp32 as a whole, its code between blocks too.
        alone: layers of those blocks that run in fp32 all the same, and return the dtype they were given.
        attention: so does the attention in those blocks.
        returned: part -> the dtype it returns by itself, which what runs between parts is given. A part in fp32 returns
            fp32 where it was given no other float: the time embedding of Kandinsky 5, whose blocks then fail
            (``comfy/ldm/kandinsky5/model.py``).
    """

    def __init__(
        self,
        own: Collection[str] | None = None,
        alone: Collection[str] = (),
        attention: bool = False,
        returned: Mapping[str, torch.dtype] | None = None,
    ):
        self.returned = returned or {}
        self.decisions = dict.fromkeys(alone, ComputeDecision(FP32.name, "same", "exchanged by the check"))
        self.own = own
        self._attention = attention
        self._depth = 0

    def everywhere(self) -> contextlib.AbstractContextManager:
        """Return the context of a whole call: where all of the model is in fp32, so is what its code casts."""
        return CastsToFp32() if self.own is None else contextlib.nullcontext()

    def forward(self, name: str, forward: Callable) -> Callable:
        """Wrap a part's forward so that it runs in fp32, or its attention alone where the part keeps its arithmetic."""
        if self.own is None or (name in self.own and not self._attention):
            return forward
        casts = contextlib.nullcontext if name in self.own else CastsToFp32

        def run(*args, **kwargs):
            self._depth += 1
            try:
                with casts():
                    return forward(*args, **kwargs)
            finally:
                self._depth -= 1

        return run

    @property
    def is_inside(self) -> bool:
        """Tell whether an attention that is called now is to run in fp32."""
        return self.own is None or self._depth > 0

    def attention(self, function: Callable, q, k, v, heads, *args, **kwargs) -> torch.Tensor:
        """Run core's own attention in fp32; its result has the dtype of ``q``."""
        call = AttentionCall(q, k, v, heads, args, kwargs)
        return call.run_in(torch.float32, full_precision_attention(function)).to(q.dtype)


def precise_layers(guarded: Guarded, model: "BaseModel", exact: ExactParts) -> EscalatedLayers:
    """Put a model in fp32 between and in its layers, but for what ``exact`` leaves.

    What the guard has widened stays so in the blocks that keep their arithmetic too.
    """
    if exact.own is None:
        return EscalatedLayers(ALL_IN_FP32, model, guarded.modes, exact)
    present = guarded.escalation
    blocks = top_level_parts(model.diffusion_model).keys() - exact.own
    in_fp32 = {name for name in guarded.modes.keys() | present.layers if present.whole or block_of(name, blocks)}
    modes = {name: FP32.name if name in in_fp32 else mode for name, mode in guarded.modes.items()}
    kept = {name: mode for name, mode in present.layers.items() if name not in in_fp32}
    escalation = Escalation(kept, frozenset(blocks) | present.blocks, present.stream or present.whole)
    return EscalatedLayers(escalation, model, modes, exact)


class MergedWeights:
    """The layers with LoRAs or other patches, of hooks too, merged into their weights, rounded to the dtype those have.

    ``modules``: layer -> module, and ``in_8_bit`` those whose weight is in 8 bits or less. Patches that Halfsafe
    keeps unmerged are none of them.
    """

    def __init__(self, patcher: "ModelPatcher"):
        self._patcher = patcher
        unmerged, hooked = unmerged_keys(patcher), patcher.get_combined_hook_patches(patcher.current_hooks)
        keys = (patcher.patches.keys() - unmerged) | hooked.keys()
        self._patches = {key: [*patcher.patches.get(key, ()), *hooked.get(key, ())] for key in keys}
        layers = {f"{DIFFUSION_MODEL}{name}.weight": (name, module) for name, module in matrix_layers(patcher.model)}
        found = (layers[key] for key in layers if key in keys)
        rounded = ((name, module) for name, module in found if _stored_dtype(module) != torch.float32)
        self.modules = {name: module for name, module in rounded if only_multiplies(module)}
        self.in_8_bit = [name for name, module in self.modules.items() if _stored_dtype(module).itemsize == 1]

    def exact(self, layers: Collection[str]) -> list[Patch]:
        """Return what makes layers multiply by their weight in fp32 as it was before any patch, its patches added."""
        return [self._patch(name, True) for name in self.modules if name in layers]

    def unpatched(self, layers: Collection[str]) -> list[Patch]:
        """Return the same of all layers, but for ``layers`` without their patches."""
        return [self._patch(name, name not in layers) for name in self.modules]

    def _patch(self, name: str, patched: bool) -> Patch:
        return self.modules[name], "forward", functools.partial(self._multiply, name, patched)

    def _multiply(self, name: str, patched: bool, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        module, key = self.modules[name], f"{DIFFUSION_MODEL}{name}.weight"
        weight = dequantized(unpatched(self._patcher, key, module).data.to(x.device)).float()
        if patched:
            original = {key: [(weight.clone(),)]}
            weight = comfy.lora.calculate_weight(self._patches[key], weight, key, original_weights=original)
        with weights_of(module)(module, x.float(), torch.float32) as (_, bias):
            return multiplied(module, kind_of(module), x.float(), weight, bias, *args, **kwargs).to(x.dtype)


def _stored_dtype(module: torch.nn.Module) -> torch.dtype:
    return stored(module.weight).dtype


@contextlib.contextmanager
def learning_apart(patcher: "ModelPatcher") -> Iterator[None]:
    """Give the model a compute plan and accumulation that learn apart from its own while the context lasts.

    No later call depends on what they measure.
    """
    compute, accumulation = compute_of(patcher), accumulation_of(patcher)
    fresh: list[tuple] = [(compute, "runs", type(compute)(compute.plan).runs)] if compute else []
    fresh += [(accumulation, "runs", type(accumulation)(accumulation.request).runs)] if accumulation else []
    with patched(fresh):
        yield


def without_step_cache(call: Call) -> Call:
    """Copy a call, with a latent of its own, past the wrappers that keep results of steps (EasyCache)."""
    copied = copy.copy(call)
    copied.x = call.x.clone()
    wrappers = dict(call.options.get("wrappers", {}))
    inner = wrappers.get(WrappersMP.DIFFUSION_MODEL, {}).items()
    left = {key: [one for one in ones if not _keeps_steps(key, one)] for key, ones in inner}
    wrappers[WrappersMP.DIFFUSION_MODEL] = left
    copied.options = {**call.options, "wrappers": wrappers}
    return copied


def with_rounded_guidance(call: Call, dtype: torch.dtype) -> Call:
    """Copy a call, its embedded guidance rounded as the model's own code rounds it, which it was made with."""
    # Flux and Hunyuan Video multiply it by 1000 in the dtype of the values between layers (``timestep_embedding`` in
    # comfy/ldm/flux/layers.py): 6.0 becomes 6016 in bf16.
    copied, guidance = copy.copy(call), call.extra.get("guidance")
    if isinstance(guidance, torch.Tensor) and guidance.is_floating_point():
        copied.extra = {**call.extra, "guidance": (guidance.to(dtype) * GUIDANCE_FACTOR).float() / GUIDANCE_FACTOR}
    return copied


def _keeps_steps(key: str | None, wrapper: object) -> bool:
    return "cache" in f"{key} {getattr(wrapper, '__qualname__', type(wrapper).__qualname__)}".lower()
