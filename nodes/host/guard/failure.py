"""Repeat a diffusion model's call that returned NaN or Inf."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from ....precision.base.amax import amax, amax_value
from ....precision.base.message import Message, joined
from ....precision.base.modes import FP16_WIDE, FP32
from ....precision.base.nested import floats_in
from ....precision.base.patching import compile_disabled, patched
from ....precision.devices.random_start import RandomStart
from ....precision.guard.failed_call import Attempt, FailedCall
from ....precision.guard.inputs import (
    SAMPLER,
    SIGMA,
    NotFiniteInput,
    inputs_not_finite,
    is_finite,
    rows_not_finite,
)
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition
from ....precision.guard.policy import plan_after
from ....precision.guard.rungs import Rung, model_rungs
from ....precision.guard.verdicts import CONTROL_ADVICE, MODEL, SAME_SEED
from ....precision.plan.in_use import PlanInUse
from ..comfyui.attributes import OVERRIDE
from ..comfyui.code_owner import code_owner
from ..comfyui.execution import is_compiled, is_on_several_devices, is_oom
from ..comfyui.layer_forward import with_frame
from ..comfyui.page import show_progress
from ..comfyui.patches import patch_name, patches_in, with_patches
from ..compute.attention import overridden
from ..compute.executor import compute_of
from ..compute.per_model import runs_in
from ..replay.call import OPTIONS, Call
from ..replay.interceptor import Run
from ..replay.restart import StartAgain
from .causes import LoadedWeights
from .escalation import Guarded, WiderModel, hooked

REPEATED_BESIDE = (
    "A failed call was repeated beside {0}, because the sampling could not restart: {0} may have kept state from the "
    "failed call."
)
CONDITIONINGS = {0: "positive conditioning", 1: "negative conditioning"}
CONTROL = "ControlNet output"
OUR_PACKAGE = __name__.partition(".nodes.")[0]


class _RangeObserver:
    """Measure the amax of inputs and results of each layer that multiplies, and of the results of
    each top-level part.

    Run the call inside of :meth:`watching`.
    """

    def __init__(self, layers: WiderModel):
        self._layers = layers.modules
        self._parts = [(name, part, self._part) for name, part in layers.parts.items()]
        self._largest: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch layers and parts inside of the context."""
        frames = (with_frame(module, functools.partial(self._layer, name)) for name, module in self._layers.items())
        with hooked(self._parts), patched(itertools.chain.from_iterable(frames)):
            yield

    def _layer(self, name: str, forward: Callable, *args, **kwargs):
        result = forward(*args, **kwargs)
        self._note(name, (args[:1], result))
        return result

    def _part(self, name: str, module: torch.nn.Module, args: tuple, result) -> None:
        self._note(name, result)

    def _note(self, name: str, values) -> None:
        for value in floats_in(values):
            size = amax(value)
            self._largest[name] = torch.maximum(self._largest[name], size) if name in self._largest else size

    def ranges(self) -> dict[str, float]:
        """Return layer or part -> amax. Synchronizes with the device once."""
        sizes = torch.stack([*self._largest.values()]).tolist() if self._largest else []
        return dict(zip(self._largest, sizes, strict=True))


class ModelCall(FailedCall):
    """One call of a diffusion model, the ``number``th of its run. Methods do what ``FailedCall`` says of them."""

    def __init__(
        self,
        run: Run,
        call: Call,
        number: int,
        start: RandomStart,
        result: torch.Tensor,
        guarded: Guarded,
        sites: frozenset = frozenset(),
        nan_weights: bool = False,
        nan_inputs: bool = False,
    ):
        self.model = call.model
        self.guarded = guarded
        self._run = run
        patcher = call.model.current_patcher
        plan = guarded.plan
        compute = compute_of(patcher)
        falls_back = bool(compute and compute.fallback) and not plan.is_wider
        rungs = model_rungs(plan, falls_back)
        can_start_again = call.sampling is not None and call.sampling.can_start_again
        self._last: Attempt | None = None
        self._observer: _RangeObserver | None = None
        super().__init__(
            call,
            result,
            start,
            CallPosition(number, call.step(), call.sigma()),
            images=call.images(result),
            device=call.x.device,
            weights=LoadedWeights(patcher),
            wording=MODEL,
            rungs=rungs[1:] if falls_back else rungs,
            fp32=Rung.in_fp32(plan),
            is_out_of_memory=is_oom,
            sites=sites,
            by_design=guarded.by_design,
            nan_weights=nan_weights,
            nan_inputs=nan_inputs,
            promised=rungs[0] if falls_back else None,
            compiled=is_compiled(patcher),
            packs=joined(call.packs(), " and "),
            can_start_again=can_start_again and not is_on_several_devices(patcher),
        )

    def repeat(
        self, rung: Rung[PlanInUse], given: Call, why: str, zeroed: Sequence[str] = (), watched: bool = False
    ) -> Attempt:
        step = f"step {self.position.step}"
        show_progress(Message("Repeating {0} {1}", step, why))
        wider = not rung.as_it_was and rung is not self.promised
        layers = WiderModel(rung.arithmetic, self.model) if wider else self.guarded.layers
        again = given.again(layers)
        if zeroed:
            zeros = functools.partial(patched, self.weights.zeroed(zeroed))
            again.executor = functools.partial(_inside, zeros, again.executor)
        if watched:
            return self._watched(again, rung)
        observer = _RangeObserver(layers) if wider and not rung.is_fp32 else None  # fp32 is the widest
        self._observer = self._observer if rung.is_fp32 else observer
        falls_back = [(runs_in(self.model), "fallback", True)] if rung is self.promised else []
        if observer:
            again.executor = functools.partial(_inside, observer.watching, again.executor)
        with patched(falls_back):
            attempt = self._attempt(again, rung)
        if not rung.is_fp32 or zeroed or not math.isfinite(attempt.largest):
            return attempt
        self.by_design |= attempt.hidden
        return replace(attempt, hidden=frozenset())

    def _watched(self, again: Call, rung: Rung) -> Attempt:
        localizer = Localizer(self.model.diffusion_model, with_frame)
        again.executor = functools.partial(_watched, localizer, again.places, again.executor)
        with compile_disabled():
            attempt = self._attempt(again, rung)
        return replace(attempt, origin=localizer.origin(attempt.result))

    def maker(self, layer: str) -> str:
        patch = patches_in(self.given.options).get(layer)
        return code_owner(patch or self.model.diffusion_model.get_submodule(layer).forward)

    def own_rungs(self, origin: Origin | None) -> list[Rung[PlanInUse]]:
        name, present = origin.layer if origin else "", self.guarded.plan
        if self.compiled or present.everywhere or name in present.patches or name not in patches_in(self.given.options):
            return []
        wide = present.wider({}, patches=frozenset([name]))
        return [Rung(Message("{0} ({1})", FP32.name, name), wide, later=SAME_SEED)]

    def replaced(self, given: Call, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        return given.replaced(function)

    def inputs(self) -> list[NotFiniteInput]:
        return _inputs_of(self.given, first=self.position.call == 1)

    def mode(self, origin: Origin | None) -> str:
        return "" if origin and origin.kind == "input" else self.guarded.modes_at(origin)[0]

    def keep(self, rung: Rung[PlanInUse], origin: Origin | None, place: Origin | None) -> tuple[str, str]:
        guarded = self.guarded
        if rung is self.promised:
            return self._fall_back()
        ranges = self._observer.ranges() if self._observer else {}
        self._change(guarded.remember(plan_after(rung.arithmetic, guarded.plan, ranges, origin)))
        return guarded.modes_at(place)

    def start_again(self, rung: Rung[PlanInUse], place: Origin | None) -> tuple[StartAgain, tuple[str, str]]:
        if rung.as_it_was:
            mode = self.mode(place)
            return StartAgain(self.given.sampling, mode), (mode, mode)
        again = StartAgain(self.given.sampling, rung.name)
        if rung is self.promised:
            modes = self._fall_back()
            if compute := compute_of(self.model.current_patcher):
                compute.measure_anew()  # it measured in the try, where a pack may have given what it kept
            return again, modes
        self._change(self.guarded.remember(self.guarded.plan | rung.arithmetic))
        return again, self.guarded.modes_at(place)

    def _fall_back(self) -> tuple[str, str]:
        runs = runs_in(self.model)
        runs.fallback = True
        self._change(functools.partial(setattr, runs, "fallback", False))
        return self.guarded.plan.dtype, FP16_WIDE.name

    def _change(self, undo: Callable[[], object]) -> None:
        """Keep a change for as long as its run does not fail."""
        if self.given.sampling is not None:
            self.given.sampling.changed.append(undo)

    def settle(self) -> None:
        """Keep ComfyUI's state after the repeat that cured the call, else restore its state before the call."""
        if self._last is None:
            return
        if self._last.finite:
            self.given.forget_dtype()
        else:
            self.given.forget()

    def _attempt(self, again: Call, rung: Rung) -> Attempt:
        """Run the model. The places that replaced NaN or Inf in the failed call are watched in every dtype.

        In the same arithmetic model code takes the same path, so a place that this repeat does not reach was skipped by
        a cache, which returned what it kept of the failed call: NaN or Inf is replaced in that result as well.
        """
        with self.guarded.clamps(self.device, () if rung.as_it_was else self.sites) as watch:
            result = self._run(again)
        hidden = watch.hidden(watch.largest.tolist()) if watch else frozenset()
        if watch and rung.as_it_was:
            hidden |= self.sites - self.by_design - watch.reached
        self._last = Attempt(result, amax_value(result), hidden=hidden)
        return self._last


def _inputs_of(call: Call, first: bool) -> list[NotFiniteInput]:
    """List the inputs of a denoiser's call with NaN or Inf.

    ``first``: it is the first call of the run, so its latent is the node's and not computed by the
    sampler.
    """
    named = [
        (SIGMA, call.t),
        (_conditioning(call.c_crossattn, call.options), call.c_crossattn),
        ("c_concat (image conditioning)", call.c_concat),
        (CONTROL, call.control),
        *((f"conditioning '{name}'", value) for name, value in call.extra.items()),
        ("latent" if first else SAMPLER, call.x),
    ]
    return inputs_not_finite(named, {CONTROL: CONTROL_ADVICE})


def _conditioning(context: torch.Tensor | None, options: dict) -> str:
    """Name the conditioning of the first row with NaN or Inf, in a batch with a chunk for each
    conditioning."""
    if context is None or is_finite(context):
        return "conditioning"
    kinds = options.get("cond_or_uncond") or [0]
    row = min(rows_not_finite(context))
    return CONDITIONINGS.get(kinds[row * len(kinds) // len(context)], "conditioning")


def _watched(localizer: Localizer, places: Sequence[str], executor: Callable, *args, **kwargs) -> torch.Tensor:
    """Run a model with every operation watched. ``places``: names of the arguments by place."""
    given = dict(zip(places, args, strict=True)) | kwargs
    named = with_patches(given[OPTIONS], lambda patch: localizer.framed(patch_name(patch), patch))
    given[OPTIONS] = _opaque_attention(localizer, named)
    with localizer.watching():
        return executor(*[given.pop(name) for name in places], **given)


def _inside(context: Callable[[], AbstractContextManager], executor: Callable, *args, **kwargs) -> torch.Tensor:
    with context():
        return executor(*args, **kwargs)


def _opaque_attention(localizer: Localizer, options: dict) -> dict:
    """Return ``transformer_options`` with attention watched as one operation, named after its kernel."""
    previous = options.get(OVERRIDE)
    others = previous is not None and not getattr(previous, "__module__", "").startswith(OUR_PACKAGE)

    def attend(function, attention, *args, **kwargs):
        name = getattr(previous, "__qualname__", type(previous).__name__) if others else function.__name__
        return localizer.opaque(Message("attention by {0}", name), attention, *args, **kwargs)

    return overridden(options, attend)
