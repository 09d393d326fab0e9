"""What the guard needs of one model and of one of its calls: how to make it again, and in what state it is known."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ...precision.dtypes import name_of
from ...precision.guard import Escalation, Where
from .clamps import clamps_in_fp16
from .compute import compute_of, own_forwards
from .escalated import EscalatedLayers, matrix_layers, safe_escalation
from .layers import is_compiled, modes_of, stream_dtype
from .per_model import fresh_control
from .step_cache import StepCache

WHOLE = Escalation(whole=True)


@dataclass
class Call:
    """One call of the denoiser, to be made as often as need be."""

    executor: Callable
    x: torch.Tensor
    t: torch.Tensor
    c_concat: torch.Tensor | None
    c_crossattn: torch.Tensor | None
    control: dict | None
    options: dict
    extra: dict

    def __post_init__(self):
        self.cache = StepCache(self.options)

    def __call__(self) -> torch.Tensor:
        arguments = (self.x, self.t, self.c_concat, self.c_crossattn, fresh_control(self.control), dict(self.options))
        return self.executor(*arguments, **self.extra)

    def where(self, number: int, result: torch.Tensor) -> Where:
        sigma = float(self.options.get("sigmas", self.t).flatten()[0])
        schedule = self.options.get("sample_sigmas")
        step = int((schedule.float().cpu() - sigma).abs().argmin()) if schedule is not None else 0
        images = max(1, result.shape[0] // max(1, len(self.options.get("cond_or_uncond") or [0])))
        return Where(number, step, sigma, sorted({row % images for row in bad_rows(result)}), images)


class Guarded:
    """One model in one state of its weights: what runs wider, and what makes it so."""

    def __init__(self, model, learned: Escalation):
        patcher = model.current_patcher
        self.model = weakref.ref(model)
        self.modules = dict(model.diffusion_model.named_modules())
        multiplying = {name for name, _ in matrix_layers(model)}
        self.modes = {name: mode for name, mode in modes_of(patcher).items() if name in multiplying}
        self.stream = name_of(stream_dtype(patcher))
        self.half = self.stream == "fp16"
        self.watches_clamps = self.half and not is_compiled(patcher) and clamps_in_fp16(model.diffusion_model)
        self.escalation = Escalation()
        self.layers: EscalatedLayers | None = None
        self.grow(learned)

    def grow(self, escalation: Escalation) -> None:
        """Run with this escalation from now on."""
        if escalation != self.escalation:
            self.escalation, self.layers = escalation, EscalatedLayers(escalation, self.model(), self.modes)

    def rungs(self) -> list[Escalation]:
        """The arithmetic to repeat a failed call in, in this order; nothing for a model that is in fp32 already."""
        lowered = any(mode != "fp32" for mode in self.modes.values()) or self.stream != "fp32"
        safe = [safe_escalation(self.modes)] if self.half and not self.escalation.whole else []
        return [*safe, WHOLE] if lowered and not self.escalation.whole else safe


def bad_rows(tensor: torch.Tensor) -> list[int]:
    """The places along the first dimension that hold NaN or Inf."""
    return (~torch.isfinite(tensor.flatten(1))).any(1).nonzero().flatten().tolist()


def state_of(model, modules: Iterable[torch.nn.Module] = ()) -> tuple:
    """What a run depends on: patched weights, hooks, the compute plan, and forwards others have put on the modules."""
    return model.current_weight_patches_uuid, *_settings(model.current_patcher), own_forwards(modules)


def known_as(model) -> tuple:
    """What is learned of a model holds for: its patches, hooks, compute plan and dtype.

    ComfyUI gives the patches of a model with hooks a new id in each run, so they are told by themselves.
    """
    patcher = model.current_patcher
    patches = tuple((key, patch[0], id(patch[1])) for key, all_of_it in patcher.patches.items() for patch in all_of_it)
    return hash(patches), *_settings(patcher)


def _settings(patcher) -> tuple:
    """Hooks hold the weights of a LoRA, and what is learned outlives them: they are named by a reference that keeps nothing."""
    hooks = getattr(patcher, "current_hooks", None)
    return hooks and weakref.ref(hooks), compute_of(patcher), name_of(stream_dtype(patcher))
