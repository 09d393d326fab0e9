"""Storage and compute dtypes on any ``torch.nn.Module``: put on with one call, taken off with another."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..arithmetic.linear import kind_of
from ..arithmetic.patching import Patch, exchange, put_back
from ..arithmetic.planned import CastResult, PlannedLayers
from ..devices.detect import detect
from ..dtypes import COMPUTE_OPTIONS, DTYPES, STORAGE_OPTIONS, dtype_named, name_of
from ..errors import HalfsafeError
from ..formats.families import family_of
from ..plan.compute import ComputePlan, plan_compute, rules_without_effect
from ..plan.facts import LayerSpec, ModelFacts, most
from ..plan.rules import Rules, rules_from
from ..plan.storage import StorageDecision, plan_storage
from .computation import Calls, CastInputs, TorchLayers
from .weights import READ_IN, STORABLE, StoredWeight, give_back, hold, settle, stored_in

ALLOWED = {
    "compute": tuple(option for option in COMPUTE_OPTIONS if option not in ("fp8", "int8")),
    "storage": tuple(n for n in STORAGE_OPTIONS if n in DTYPES and DTYPES[n].is_floating_point),
}
# Torch's fused kernels read the weights of these modules' layers without a call of their forward.
FUSED = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
HANDLE = "_halfsafe_applied"
COMPUTED = "its weight is computed when it is read"
NONE_PLANNED = "every layer runs by its own forward, on tensors that are read in the activation dtype"


def apply(
    module: torch.nn.Module,
    settings: Mapping[str, Any] | None = None,
    *,
    compute: str | None = None,
    storage: str | None = None,
    rules: Rules | str = "",
    keep: bool = False,
) -> Applied:
    """Give a module a compute dtype, a storage dtype, or both, until the result's ``remove()``.

    ``storage`` holds the weights of Linear and convolution layers in another dtype and computes them in the module's
    own each time they are read. The module can be copied, pickled, moved, cast and shared by threads. Its state dict is
    as before, and one that is loaded is stored.

    ``compute`` exchanges the forwards of these layers, and has every other parameter and buffer read in the activation
    dtype, which is fp32 for ``fp16_safe`` and that of the results. Other methods than ``forward`` compute so too;
    ``forward`` also casts its floating inputs, but for timesteps. Autocast does not act inside. torch.compile makes one
    graph of the module; with ``fp16_safe`` only of parts that are compiled by themselves.

    What is computed when it is read, such as ``layer.weight``, cannot be written into: that is an error.

    Args:
        module: in evaluation mode, in a floating dtype and on any device but meta; not compiled and not scripted.
        settings: the other arguments as a mapping of plain data, which win over those given by name.
        compute: ``fp16_safe`` (fp16 matmul operands, fp32 between layers, cannot overflow), ``fp16``, ``bf16``,
            ``fp32``, or ``auto`` for what the module's device is fast at.
        storage: ``fp8_e4m3fn`` or ``fp8_e5m2`` with one scale per tensor (Linear layers only), ``fp16``, ``bf16`` or
            ``fp32``.
        rules: exceptions per layer, as text on top of the default preset, which keeps sensitive layers out of fp8, or
            from :func:`rules_from`.
        keep: hold the original weights in host memory, so that ``remove()`` restores them bit by bit.

    Raises:
        HalfsafeError: why this cannot be done with a setting, a rule, a weight or the module, which is as it was.

    ``fp16_safe`` is right where the module's own fp16 overflows:

    >>> import torch
    >>> from halfsafe.precision import apply
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 8, bias=False)).eval()
    >>> _ = model[0].weight.data.fill_(100.0)
    >>> x = torch.full((1, 64), 100.0)
    >>> with torch.inference_mode():
    ...     exact = model(x)
    ...     handle = apply(model, compute="fp16_safe")
    ...     safe = model(x)
    ...     handle.remove()
    ...     overflowed = model.half()(x.half())
    >>> handle.modes()
    {'0': 'fp16_wide', '1': 'fp16_scaled'}
    >>> bool((safe - exact).norm() < 1e-3 * exact.norm()), bool(overflowed.isfinite().all())
    (True, False)

    :class:`Applied` has an example of fp8 storage.
    """
    asked = {"compute": compute, "storage": storage, "rules": rules, "keep": keep, **(settings or {})}
    if not isinstance(asked["rules"], Rules):
        asked["rules"] = rules_from(asked["rules"])
    for problem, advice in _problems(module, **asked):
        raise HalfsafeError(problem, advice)
    applied = Applied(module)
    try:
        with torch.inference_mode(False), torch.no_grad():
            applied.put_on(**asked)
    except BaseException:
        applied.remove()
        raise
    return applied


def restore(module: torch.nn.Module) -> None:
    """Take off what :func:`apply` put on a module. Nothing happens to a module that nothing was put on."""
    if applied := module.__dict__.get(HANDLE):
        applied.remove()


class Applied(AbstractContextManager):
    """What :func:`apply` put on a module. As a context it is removed at the end.

    Attributes:
        stored: layer name -> the storage its weight was brought to.
        kept: layer name -> why its weight is not stored as asked: rules, a tied weight, values the dtype cannot hold.
        skipped: layer name -> why it runs by its own forward, where a compute dtype was asked for.
        without_effect: (rule, reason) of the rules that this call does not follow.

    fp8 storage, as a context; ``keep`` makes the way back exact:

    >>> import torch
    >>> from halfsafe.precision import apply
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).eval()
    >>> before = model[0].weight.clone()
    >>> with apply(model, storage="fp8_e4m3fn", rules="2 storage=bf16", keep=True) as handle, torch.inference_mode():
    ...     y = model(torch.randn(4, 64))
    ...     handle.stored
    {'0': 'fp8_e4m3fn', '2': 'bf16'}
    >>> torch.equal(model[0].weight, before)
    True
    """

    def __init__(self, module: torch.nn.Module):
        self.stored: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.without_effect: list[tuple[str, str]] = []
        self._module = module
        self._holders: list[torch.nn.Module] = []
        self._planned: PlannedLayers | None = None
        self._exchanged: list[Patch] = []
        exchange([(module, HANDLE, self)], self._exchanged)

    def put_on(self, compute: str | None, storage: str | None, rules: Rules, keep: bool) -> None:
        """Plan, store and exchange; :func:`apply` does it, with settings that it has checked."""
        named = self._module.named_modules()
        layers = {name: one for name, one in named if kind_of(one) and torch.is_tensor(getattr(one, "weight", None))}
        specs = [LayerSpec(name, _class_of(layer), tuple(layer.weight.shape)) for name, layer in layers.items()]
        self.without_effect += [*rules_without_effect(specs, rules), *_rules_ignored(rules, compute, storage)]
        plan = _plan(self._module, specs, compute, rules) if compute else None
        if storage:
            self._store(layers, plan_storage(specs, storage, rules), keep)
            if not (self.stored or self.kept):
                self.without_effect.append((f"storage={storage}", "it changes no weight of this module"))
        if plan:
            self._compute(layers, plan)
            if not self.modes():
                self.without_effect.append((f"compute={compute}", NONE_PLANNED))

    def _store(self, layers: dict[str, torch.nn.Module], decisions: Mapping[str, StorageDecision], keep: bool) -> None:
        """Store the weights of layers as decided, tied ones together."""
        self.kept.update((name, decision.reason) for name, decision in decisions.items() if decision.kept)
        wanted = {name: decision.storage for name, decision in decisions.items() if decision.storage != "as_file"}
        computed = {name for name in wanted if stored_in(layers[name]) or "weight" not in layers[name]._parameters}
        self.kept.update(dict.fromkeys(computed, COMPUTED))
        for weight, names in _holders_of_parameters(self._module).items():
            storages = {wanted.get(name) for name in names if name not in computed}
            if storages <= {None} or (weight.dtype in STORABLE and storages == {name_of(weight.dtype)}):
                continue
            problem = f"its weight is that of {' and '.join(names)}, and these are not stored alike"
            if len(storages) == 1:
                stored = StoredWeight(wanted[names[0]], keep)
                problem = stored.store(f"{names[0]}.weight", weight)
            if problem:
                self.kept.update((name, problem) for name in names if name in wanted)
            else:
                hold(stored, [layers[name] for name in names])
                self._holders += [layers[name] for name in names]
                self.stored.update((name, stored.storage) for name in names)

    def _compute(self, layers: dict[str, torch.nn.Module], plan: ComputePlan) -> None:
        """Exchange the forwards of the module and of its layers, and the dtype that its tensors are read in."""
        inside, dtype = list(self._module.modules()), dtype_named(plan.activation_dtype)
        fused = {inner for outer in inside if isinstance(outer, FUSED) for inner in outer.modules()}
        reasons = {name: _why_not_planned(layer, layer in fused) for name, layer in layers.items()}
        self.skipped.update((name, reason) for name, reason in reasons.items() if reason)
        self.without_effect += plan.without_effect
        planned = {name: layer for name, layer in layers.items() if not reasons[name]}
        decisions = {name: plan.decisions.get(name) or plan.following for name in planned}
        self._planned = PlannedLayers(decisions, planned, TorchLayers(), dtype, plan.is_safe)
        calls = Calls(self._planned.calibration)
        calls.calibration.calibrating = bool(self._planned.operations)
        # A copy that shares its table looks up in the table's own dtype: the whole table is not cast at each call.
        lookups = [one for one in inside if isinstance(one, torch.nn.Embedding)]
        patches: list[Patch] = [(one, "forward", CastResult(copy.copy(one).forward, dtype)) for one in lookups]
        patches += [(one, name, partial(calls.make, forward)) for one, name, forward in self._planned.patches]
        patches += [(one, READ_IN, dtype) for one in inside if one._parameters or one._buffers]
        exchange(patches, self._exchanged)
        settle(inside)
        called = CastInputs(self._module, dtype, partial(calls.make, self._module.forward))
        exchange([(self._module, "forward", called.__call__)], self._exchanged)

    def modes(self) -> dict[str, str]:
        """Map each layer that multiplies to the arithmetic it runs in, from its last call on for ``fp16_safe``.

        One of fp16, bf16, fp32, ``fp16_wide`` (fp16 operands, fp32 result) and ``fp16_scaled`` (the same, its input
        scaled by a power of two). Empty without a compute dtype.
        """
        return self._planned.observed_modes() if self._planned else {}

    def remove(self) -> None:
        """Put the module's forward and weights back. A second call does nothing."""
        changed = {*self._holders, *(module for module, _, _ in self._exchanged)}
        put_back(self._exchanged)
        with torch.inference_mode(False), torch.no_grad():
            give_back(self._holders)
        self._holders = []
        settle(changed)

    def __exit__(self, *error: object) -> None:
        self.remove()


def _problems(
    module: torch.nn.Module, compute: str | None, storage: str | None, rules: Rules, keep: bool, **unknown: Any
) -> Iterator[tuple[str, str]]:
    """Yield what keeps settings from being applied to a module, and what to do."""
    if unknown:
        yield f"There is no setting {', '.join(sorted(unknown))}.", "Use: compute, storage, rules, keep."
    asked = [(f"{key}='{value}'", key, value) for key, value in (("compute", compute), ("storage", storage))]
    of_rules = [(f"The rule '{rule}'", key, value) for rule in rules.own for key, value in rule.settings]
    for setting, key, value in asked + [one for one in of_rules if one[1:] != ("storage", "as_file")]:
        if value not in (None, *ALLOWED.get(key, (value,))):
            yield f"{setting} cannot be applied to a module.", f"Use one of: {', '.join(ALLOWED[key])}."
    inside = list(module.modules())
    if hasattr(module, "_orig_mod") or any(isinstance(inner, torch.jit.ScriptModule) for inner in inside):
        yield "The module, or a part of it, is compiled or scripted.", "Apply to the one that it was made from."
    for name, parameter in module.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            yield f"{name} is on the meta device, or of a lazy layer: it has no values.", "Load the weights first."
    if HANDLE in module.__dict__:
        yield "Something is applied to this module already.", "Remove it first: restore(module)."
    if compute and any(READ_IN in inner.__dict__ for inner in inside):
        yield "The module or a part of it has a compute dtype.", "Apply one to the whole, with rules for its parts."


def _holders_of_parameters(module: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """Map each parameter to the modules that have it as ``weight``, and to its names where it is none."""
    found: dict[torch.nn.Parameter, list[str]] = {}
    for name, inner in module.named_modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append(name if key == "weight" else f"{name}.{key}")
    return found


def _class_of(layer: torch.nn.Module) -> str:
    """Name a layer's class as rules and plans know it: subclasses of Linear multiply as Linear does."""
    return "Linear" if isinstance(layer, torch.nn.Linear) else type(layer).__name__


def _why_not_planned(layer: torch.nn.Module, fused: bool) -> str:
    """Say why a layer has to run by its own forward; empty where it has not."""
    if fused:
        return "a fused kernel of torch reads its weight without calling it"
    if not type(layer).forward.__module__.startswith("torch.nn.modules.") or "forward" in layer.__dict__:
        return "it has a forward of its own"
    if not layer.weight.is_floating_point() or layer.weight.numel() == 0:
        return f"its weight is {name_of(layer.weight.dtype)} of {layer.weight.numel()} values"
    return "" if "weight" in layer._parameters else COMPUTED


def _rules_ignored(rules: Rules, compute: str | None, storage: str | None) -> Iterator[tuple[str, str]]:
    """Yield (rule, reason) for each of the user's rules with a setting that this call does not follow."""
    followed = {"storage": storage, "compute": compute, "stream": compute}
    for rule in rules.own:
        if ignored := [key for key, _ in rule.settings if not followed.get(key)]:
            yield str(rule), f"this call sets no {' and no '.join(ignored)}"


def _plan(module: torch.nn.Module, specs: list[LayerSpec], compute: str, rules: Rules) -> ComputePlan:
    parameters, sizes = dict(module.named_parameters()), Counter[str]()
    for parameter in parameters.values():
        sizes[name_of(parameter.dtype)] += parameter.numel()
    family = family_of({name: tuple(parameter.shape) for name, parameter in parameters.items()})
    facts = ModelFacts(tuple(specs), sum(sizes.values()), most(sizes), family.supported)
    device = next((parameter.device for parameter in parameters.values()), None)
    return plan_compute(facts, detect(device), compute, rules)
