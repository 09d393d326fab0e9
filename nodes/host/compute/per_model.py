"""Cache the state that a wrapper learns of each model, for the lifetime of the model and per state
of the model."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from comfy.model_patcher import ModelPatcher
from torch.utils.weak import WeakIdKeyDictionary

from ....precision.base.nested import tensors_in
from ....precision.plan.in_use import PlanInUse
from ..comfyui.attributes import FORWARDS, INPUT_SCALE, OVERRIDE, weight_state
from ..comfyui.kernels import DATA
from ..comfyui.weights import has_own_forward

KEPT = 4


@dataclass
class _RunsIn:
    """The fallback and the wider plans that a model's calls run in, because calls failed in its own
    plan.

    Attributes:
        fallback: the plan's fallback, where the plan has one.
        wider: state of the model -> the plan that guards widened.
    """

    fallback: bool = False
    wider: dict[tuple, PlanInUse] = field(default_factory=dict)


_runs_in: weakref.WeakKeyDictionary[torch.nn.Module, _RunsIn] = weakref.WeakKeyDictionary()


def runs_in(model: torch.nn.Module) -> _RunsIn:
    """Return the record of the fallback and the wider plans that a model runs in, the same for each
    of its patchers, until the model is unloaded.

    It is not stored on the model, whose attributes are restored before a repeat.
    """
    return _runs_in.setdefault(model, _RunsIn())


class AddsToResults:
    """Base of a ModelPatcher that adds LoRAs to results in place of weights."""

    def leaves_weights_alone(self) -> bool:
        """True if no patch is merged into any weight."""
        raise NotImplementedError


class _ModelRun(Protocol):
    """State that a wrapper learned of one model. ``modules``: the modules it patches, by name.
    ``found``: what other code had put on these modules when this run was created."""

    @property
    def modules(self) -> dict[str, torch.nn.Module]: ...

    @property
    def found(self) -> list[int]: ...


Run = TypeVar("Run", bound=_ModelRun)


class PerModel(Generic[Run]):
    """Cache the runs of one wrapper by the state of the model.

    Args:
        make: creates the run of a model in its present state.
        settings: extra cache key of a ModelPatcher, compared for equality. Patches of weights, active hooks and what
            other code put on the run's modules are always part of the key.
    """

    def __init__(
        self, make: Callable[[torch.nn.Module], Run], settings: Callable[[ModelPatcher], tuple] = lambda _: ()
    ):
        self._make = make
        self._settings = settings
        self._runs: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[tuple, Run]]] = weakref.WeakKeyDictionary()
        self._patches: weakref.WeakKeyDictionary[Run, object] = weakref.WeakKeyDictionary()
        self._branches: weakref.WeakKeyDictionary[Run, set[tuple]] = weakref.WeakKeyDictionary()
        """A run -> the branches of the patchers that made its calls."""

    def of(self, model: torch.nn.Module) -> Run:
        """Return the run for the model's present state; the last ``KEPT`` states are cached.

        It is recalibrated if the unmerged LoRAs have changed: they do not change weights, but they
        change the layers' inputs."""
        run, state = self._found(model), weight_state(model)
        if self._patches.setdefault(run, state) != state:
            self._patches[run] = state
            self._branches[run] = {self._branch(model.current_patcher)}
            if hasattr(run, "calibration"):
                run.calibration.recalibrate()
        return run

    def _found(self, model: torch.nn.Module) -> Run:
        runs, state = self._runs.setdefault(model, []), self._state(model)
        alike = (run for own, run in runs if own == state and run.found == put_on(run.modules))
        run = next(alike, None) or self._make(model)
        branches = self._branches.setdefault(run, set())
        if model.current_patcher is not None:  # detached from its last patcher, as between two prompts
            branches.add(self._branch(model.current_patcher))
        runs[:] = [(state, run), *(each for each in runs if each[1] is not run)][:KEPT]
        return run

    def kept(self) -> list[Run]:
        """Return the cached runs of every model and state, of a model the last one first."""
        return [run for runs in list(self._runs.values()) for _, run in runs]

    def last_of(self, patcher: ModelPatcher) -> Run | None:
        """Return the run of the last call with a patcher or a clone of its branch; None before any
        call."""
        return next(iter(self.runs_of(patcher)), None)

    def runs_of(self, patcher: ModelPatcher) -> list[Run]:
        """Return the runs of a patcher's branch, most recent first, then those of its clones on
        other devices (MultiGPU)."""
        branch, own = self._branch(patcher), self._runs.get(patcher.model, [])
        others = [runs for model, runs in list(self._runs.items()) if model is not patcher.model]
        return [run for runs in [own, *others] for _, run in runs if branch in self._branches[run]]

    def _branch(self, patcher: ModelPatcher) -> tuple:
        return *branch_of(patcher), *self._settings(patcher)

    def _state(self, model: torch.nn.Module) -> tuple:
        current = model.current_patcher
        alone = isinstance(current, AddsToResults) and current.leaves_weights_alone()
        return None if alone else weight_state(model), hooks_of(current), *self._settings(current)


def put_on(modules: dict[str, torch.nn.Module]) -> list[int]:
    """Return ids of what other code put on modules; a run is valid for one such list. Forwards that
    modules did not get from their classes, of an outer wrapper or of a LoRA in bypass mode
    (comfy/weight_adapter/bypass.py), forwards of their classes, which a pack may replace at any
    time, and scales for their inputs (``pre_quant_scale``)."""
    of_classes = [id(getattr(cls, name, None)) for cls in {*map(type, modules.values())} for name in FORWARDS]
    exchanged = [module for module in modules.values() if "forward" in module.__dict__]
    scaled = [
        id(module)
        for module in modules.values()
        # Looked up as nn.Module does: ``hasattr`` for a name that is not there takes ten times as long.
        if INPUT_SCALE in module._parameters or INPUT_SCALE in module._buffers or INPUT_SCALE in module.__dict__
    ]
    return [
        *sorted(of_classes),
        *scaled,
        *(id(module.__dict__["forward"]) for module in exchanged if has_own_forward(module)),
    ]


def hooks_of(patcher) -> weakref.ref | None:
    """Return a weak reference to the active hooks: they own a LoRA's weights, and the key outlives
    them."""
    hooks = getattr(patcher, "current_hooks", None)
    return hooks and weakref.ref(hooks)


_count = itertools.count()
_numbers = WeakIdKeyDictionary()
PATCHES = "halfsafe_patches"
"""The attribute of a patcher with its ``patches_uuid`` and the hash of its patches under that."""


def branch_of(patcher: ModelPatcher) -> tuple[int, int]:
    """Key of a patcher among those of its model: hash of its weight patches and id of its attention
    override.

    ComfyUI clones patchers in every node; clones with the same key belong to one branch.
    """
    override = patcher.model_options.get("transformer_options", {}).get(OVERRIDE)
    return patches_of(patcher), id(override)


def patches_of(patcher: ModelPatcher) -> int:
    """Hash a patcher's weight patches by their tensors; with hooks, ComfyUI assigns a new
    ``patches_uuid`` per run."""
    known = vars(patcher).get(PATCHES)
    if known is None or known[0] != patcher.patches_uuid:
        pairs = [(key, patch) for key, patches in patcher.patches.items() for patch in patches]
        patches = tuple((key, patch[0], _number_of(patch[1])) for key, patch in pairs)
        known = patcher.patches_uuid, hash(patches)
        setattr(patcher, PATCHES, known)
    return known[1]


def _number_of(patch) -> tuple[int, int]:
    """Return what tells a patch's tensors from others: a number of their storage, and the place in
    it. Ids of objects are reused after a LoRA is freed, and a weak reference to a tensor forbids
    ``torch.utils.swap_tensors``."""
    tensors = tensors_in([getattr(patch, "weights", patch)])
    if not tensors:
        return id(patch), 0
    first = getattr(tensors[0], DATA, tensors[0])  # a quantized tensor has no storage of its own
    return _numbers.setdefault(first.untyped_storage(), next(_count)), first.storage_offset()
