"""Run a model with some parts in wider dtypes, and remember what earlier runs needed."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from ....precision.arithmetic.casting import widened
from ....precision.base.dtypes import name_of
from ....precision.base.modes import FP8, FP16_WIDE, FP32, modes_named
from ....precision.base.options import Stream
from ....precision.base.patching import Patch
from ....precision.formats.layer_plan import LayerPlan
from ....precision.guard.localize import Origin
from ....precision.plan.compute import ComputePlan
from ....precision.plan.in_use import PlanInUse
from ..comfyui.attributes import weight_state
from ..comfyui.execution import Make, is_compiled
from ..comfyui.layers import matrix_layers, modules_of, top_level_parts
from ..comfyui.patches import patch_name, with_patches
from ..comfyui.weights import only_multiplies
from ..compute.attention import full_precision_attention, in_one_dtype, kernels_of
from ..compute.borders import bordered, crossing, with_borders
from ..compute.executor import compute_of
from ..compute.layer_modes import settings_of, states_of, stream_dtype
from ..compute.per_model import hooks_of, patches_of, runs_in
from ..compute.planned_model import PlannedModel, in_fp32
from ..replay.model_compiler import compiler_off
from .asked import AskedWeights
from .clamps import ClampWatch

ORIGINAL_BLOCK = "original_block"
"""Entry of the arguments that ComfyUI gives a patch in place of a block, which runs the block."""


class WiderModel(PlannedModel):
    """Run a model's calls under a wider plan than its own: the arithmetic of a rung."""

    def __init__(self, plan: PlanInUse, model: BaseModel):
        self.in_use = plan
        self.everywhere = plan.everywhere
        self.parts = top_level_parts(model.diffusion_model)
        modules = modules_of(model)
        patcher = model.current_patcher  # None between two prompts
        compute = compute_of(patcher) if patcher else None
        planned = compute.plan.decisions if compute else {}
        decisions = {}
        for name, mode in plan.exchanged().items():
            own = planned.get(name, LayerPlan())
            wide = FP32.name if own.mode == FP32.name else mode  # no narrower than a rule asks
            decisions[name] = _decision(wide, modules[name], "fp32" if self.everywhere else own.stream)
        self.decided = {name: decision.mode for name, decision in decisions.items()}
        if self.everywhere:  # other layers run as their code has it, on fp32 activations
            self.decided |= dict.fromkeys(modules.keys() - decisions.keys(), FP32.name)
        super().__init__(ComputePlan.of_layers(decisions), model)
        self.is_in_fp32 = self.everywhere
        self._entry = in_fp32(model) if self.everywhere else []

    @property
    def has_borders(self) -> bool:
        # torch.compile makes a graph anew for each function it has not met.
        return self.everywhere and not is_compiled(self._model().current_patcher)

    def options_of_call(self, options: dict) -> dict:
        if self.in_use.patches and not is_compiled(self._model().current_patcher):
            options = with_patches(options, self._widened)
        return with_borders(options, bordered, crossing) if self.has_borders else options

    def _widened(self, patch: Callable) -> Callable:
        """Return a patch of another node as it runs in a call: in fp32 itself, if it is among those widened."""
        if patch_name(patch) not in self.in_use.patches:
            return patch
        return _in_fp32(patch, torch.float32 if self.everywhere else stream_dtype(self._model().current_patcher))

    def _settle_flags(self) -> None:
        super()._settle_flags()
        if self.everywhere:
            self._sums_off = True

    def patches_of_call(self) -> list[Patch]:
        return [*self._entry, *self.patches]

    def adapted(self, make: Make) -> dict:
        """Run a text adapter, which calls layers of the model outside of its calls."""
        return self.run(make, self.patches_of_call)

    def modes(self) -> dict[str, str]:
        """Map each layer to the mode that it runs in now."""
        return self.decided | {name: forward.mode for name, forward in self.layers.forwards.items()}

    @property
    def attend(self) -> Callable | None:
        return self._attend if self.everywhere else None

    @property
    def inputs(self) -> None:
        return None

    def _attend(self, function: Callable, attention: Callable, q, k, v, heads: int, *args, **kwargs) -> torch.Tensor:
        plain = full_precision_attention(function)
        if self.in_use.whole:
            return in_one_dtype(plain, q, k, v, heads, *args, **kwargs)
        return self.attention(kernels_of(plain, plain, args, kwargs), q, k, v, heads, *args, **kwargs)


def _in_fp32(patch: Callable, stream: torch.dtype) -> Callable:
    wide = widened(patch, stream)

    def run(*args, **kwargs):
        runs_a_block = any(isinstance(each, dict) and ORIGINAL_BLOCK in each for each in args)
        return (patch if runs_a_block else wide)(*args, **kwargs)

    run.__wrapped__ = patch
    return run


@contextlib.contextmanager
def hooked(watched: Iterable[tuple[str, torch.nn.Module, Callable]]) -> Iterator[None]:
    """Call a function with (name, module, arguments, result) after each run of its module, by forward hooks: the
    forwards, which other code inspects, are not exchanged."""
    handles = [module.register_forward_hook(functools.partial(note, name)) for name, module, note in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _decision(mode: str, module: torch.nn.Module, stream: Stream) -> LayerPlan:
    """Return the decision for a layer with this mode under a wider plan.

    A custom layer of another loader, which does more than multiply, runs in fp32 instead of fp16_wide; fp8 operands
    become fp16. An int8 layer that is not escalated itself stays int8: its product of fp32 activations cannot overflow.
    """
    if any(known.is_wide for known in modes_named([mode])):
        mode = FP16_WIDE.name if only_multiplies(module) else FP32.name
    mode = FP16_WIDE.name if mode == FP8.name else mode  # no fp64: a model in it is escalated as a whole
    return LayerPlan(mode=mode, stream=stream, reason="escalated by the guard")  # type: ignore[arg-type]


def watches_clamps(patcher: ModelPatcher) -> bool:
    """Return whether operations of a model's code may hide an fp16 overflow and can be watched."""
    return stream_dtype(patcher) == torch.float16 and not is_compiled(patcher)


class Guarded:
    """What a guard knows of a model in one state of its weights. ``recall``: start with what earlier guards learned.

    Attributes:
        by_design: places in the model's code that replace NaN or Inf by a number in fp32 too.
    """

    def __init__(self, model: BaseModel, recall: bool):
        patcher = model.current_patcher
        self.model = weakref.ref(model)
        states = states_of(patcher)
        modes = {name: states[name].planned for name, _ in matrix_layers(model)}
        self.plan = PlanInUse(modes, name_of(stream_dtype(patcher)))
        self.watches_clamps = watches_clamps(patcher)
        self.by_design: set = set()
        self._asked: tuple | None = None
        self.device = patcher.load_device
        self.layers: WiderModel | None = None
        if recall:
            self.grow(self.plan | runs_in(model).wider.get(_known_as(model), self.plan))

    def clamps(
        self, device: torch.device, also: Collection = ()
    ) -> contextlib.AbstractContextManager[ClampWatch | None]:
        """Watch what the model's own code hides in a call. ``also``: places to watch in every dtype."""
        return ClampWatch(device, self.by_design, also) if self.watches_clamps else contextlib.nullcontext()

    @contextlib.contextmanager
    def asking(self) -> Iterator[AskedWeights | None]:
        """Ask the weights for NaN in the first call in each state of them; yield None in other calls."""
        patcher = self.model().current_patcher
        state = weight_state(self.model()), patcher.patches_uuid
        if state == self._asked:
            yield None
            return
        asked = AskedWeights(patcher)
        with compiler_off, asked.watching():
            yield asked
        self._asked = state

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The layers that are patched; empty under the model's own plan."""
        return self.layers.modules if self.layers else {}

    @property
    def found(self) -> list[int]:
        return self.layers.found if self.layers else []

    def begin_run(self) -> None:
        """Start a sampler's run."""
        if self.layers:
            self.layers.begin_run()

    def grow(self, plan: PlanInUse) -> None:
        """Run under this plan from now on."""
        if plan != self.plan:
            self.plan = plan
            self.layers = WiderModel(plan, self.model()) if plan.is_wider else None

    def remember(self, plan: PlanInUse, state: tuple | None = None) -> Callable[[], object]:
        """Run under this plan from now on, in later runs of the model too. Returns a function that undoes this.

        ``state``: the state of the model to remember the plan for; None for its present state.
        """
        before = self.plan
        state = state or _known_as(self.model())
        self.grow(plan)
        runs_in(self.model()).wider[state] = plan
        return functools.partial(self.remember, before, state)

    def modes_at(self, origin: Origin | None) -> tuple[str, str]:
        """Return (planned mode, mode now) of the layer that failed, or of the values between layers."""
        layer = origin.layer if origin else ""
        own = self.plan.modes.get(layer, self.plan.dtype)
        if layer not in self.plan.modes:
            return own, "fp32" if self.plan.is_wider else own
        return own, self.layers.modes().get(layer, own) if self.layers else own


def depends_on(patcher: ModelPatcher) -> tuple:
    """Return what a guard's findings depend on besides weights: unmerged LoRAs change which layers overflow."""
    return patches_of(patcher), *settings_of(patcher)


def _known_as(model: BaseModel) -> tuple:
    return hooks_of(model.current_patcher), *depends_on(model.current_patcher)
