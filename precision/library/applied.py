"""Storage and compute dtypes on any ``torch.nn.Module``: put on with one call, taken off with another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..arithmetic.linear import kind_of
from ..arithmetic.planned import CastResult, PlannedLayers
from ..devices.detect import detect
from ..dtypes import COMPUTE_OPTIONS, STORAGE_OPTIONS, dtype_named, name_of
from ..errors import HalfsafeError
from ..formats.families import family_of
from ..plan.compute import ComputePlan, plan_compute, rules_without_effect
from ..plan.facts import LayerSpec, ModelFacts, most
from ..plan.rules import Rules, rules_from
from ..plan.storage import StorageDecision, plan_storage
from .computation import Called, Calls, PlannedForward, TorchLayers
from .weights import StoredWeight, give_back, parameters, read_in, store, why_not_stored

COMPUTE_DTYPES = tuple(option for option in COMPUTE_OPTIONS if option not in ("fp8", "int8"))
STORAGE_DTYPES = tuple(option for option in STORAGE_OPTIONS[2:] if option != "int8")
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
    own each time they are read: what reads ``layer.weight`` gets a tensor, no parameter, and what is written into it is
    lost. The module can be copied, pickled, moved, cast and shared by threads. Its state dict has the names and dtypes
    it had before, so it is as large as before too, and one that is loaded is stored.

    ``compute`` exchanges the forwards of these layers, and has every other parameter and buffer read in the activation
    dtype, which is fp32 for ``fp16_safe`` and that of the results. Other methods than ``forward`` compute so too;
    ``forward`` also casts its floating inputs, but for timesteps. Autocast does not act inside. torch.compile makes one
    graph of the module; with ``fp16_safe`` only of parts that are compiled by themselves.

    Args:
        module: in evaluation mode, in a floating dtype and on any device but meta; not compiled and not scripted.
        settings: the other arguments as a mapping of plain data, such as ``{"compute": "fp16_safe"}``, which win over
            those given by name; :func:`portable_apply` takes them to another process.
        compute: ``fp16_safe`` (fp16 matmul operands, fp32 between layers, cannot overflow), ``fp16``, ``bf16``,
            ``fp32``, or ``auto`` for what the module's device is fast at. None leaves the arithmetic alone.
        storage: ``fp8_e4m3fn`` or ``fp8_e5m2`` with one scale per tensor (Linear layers only), ``fp16``, ``bf16`` or
            ``fp32``. None leaves the weights alone. ``kept`` of the result names the weights that stay as they are:
            those that rules keep, tied ones that are not all stored alike, and values that the dtype would not hold.
        rules: exceptions per layer, as text on top of the default preset, which keeps sensitive layers out of fp8, or
            from :func:`rules_from`. ``without_effect`` of the result names those that this call does not follow.
        keep: hold the original weights in host memory, so that ``remove()`` restores them bit by bit. Without it,
            ``remove()`` can only return what the storage dtype holds. Both in the dtype the module was cast to since.

    Raises:
        HalfsafeError: no such setting or dtype, the module is compiled or scripted, something is applied to it or a
            compute dtype to a part of it, a weight is on the meta device or holds NaN or Inf, or a rule asks for what
            no module can have. The module is as it was.

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
    if settings is not None:
        named = {"compute": compute, "storage": storage, "rules": rules, "keep": keep}
        return apply(module, **{**named, **_known(settings, named)})
    rules = rules if isinstance(rules, Rules) else rules_from(rules)
    _check(module, compute, storage, rules)
    return _put_on(module, compute, storage, rules, keep)


def _put_on(module: torch.nn.Module, compute: str | None, storage: str | None, rules: Rules, keep: bool) -> Applied:
    """Plan and exchange; put everything back where that fails."""
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if kind_of(layer) and torch.is_tensor(getattr(layer, "weight", None))
    }
    if on_meta := [name for name, layer in layers.items() if layer.weight.is_meta]:
        raise HalfsafeError(f"{on_meta[0]}.weight is on the meta device: it has no values.", "Load the weights first.")
    specs = [LayerSpec(name, _class_of(layer), tuple(layer.weight.shape)) for name, layer in layers.items()]
    plan = _plan(module, specs, compute, rules) if compute else None
    applied = Applied(module, _without_effect(specs, rules, compute, storage))
    try:
        with torch.inference_mode(False), torch.no_grad():
            if storage:
                applied.store(layers, plan_storage(specs, storage, rules), keep)
                if not (applied.stored or applied.kept):
                    applied.without_effect.append((f"storage={storage}", "it changes no weight of this module"))
            if plan:
                applied.compute(plan, layers)
                if not applied.modes():
                    applied.without_effect.append((f"compute={compute}", NONE_PLANNED))
    except BaseException:
        applied.remove()
        raise
    return applied


def restore(module: torch.nn.Module) -> None:
    """Take off what :func:`apply` put on a module. Nothing happens to a module that nothing was put on.

    >>> import torch
    >>> from halfsafe.precision import apply, restore
    >>> model = torch.nn.Linear(32, 32).eval()
    >>> _ = apply(model, compute="bf16")
    >>> model(torch.ones(1, 32)).dtype
    torch.bfloat16
    >>> restore(model)
    >>> model(torch.ones(1, 32)).dtype
    torch.float32
    """
    if applied := module.__dict__.get(HANDLE):
        applied.remove()


class Applied:
    """What :func:`apply` put on a module. As a context it is removed at the end.

    Attributes:
        stored: layer name -> the storage its weight was brought to.
        kept: layer name -> why its weight is not stored as asked.
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

    def __init__(self, module: torch.nn.Module, without_effect: Iterable[tuple[str, str]]):
        self.stored: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.without_effect = list(without_effect)
        self._module = module
        self._layers: list[torch.nn.Module] = []
        self._read: list[torch.nn.Module] = []
        self._planned: PlannedLayers | None = None
        self._forwards: list[tuple[torch.nn.Module, Callable | None]] = []
        module.__dict__[HANDLE] = self

    def store(
        self, layers: Mapping[str, torch.nn.Module], decisions: Mapping[str, StorageDecision], keep: bool
    ) -> None:
        """Store the weights of layers as decided, tied ones together; :func:`apply` does it."""
        self.kept.update((name, decision.reason) for name, decision in decisions.items() if decision.kept)
        wanted = {name: decision.storage for name, decision in decisions.items() if decision.storage != "as_file"}
        self.kept.update((name, COMPUTED) for name in wanted if "weight" not in layers[name]._parameters)
        for names in _holders(self._module):
            storages = {wanted.get(name) for name in names}
            if storages == {None}:
                continue
            if len(storages) > 1:
                why = f"its weight is that of {' and '.join(names)}, and these are not stored alike"
                self.kept.update((name, why) for name in names if name in wanted)
            else:
                self._store([layers[name] for name in names], names, wanted[names[0]], keep)

    def _store(self, layers: list[torch.nn.Module], names: list[str], storage: str, keep: bool) -> None:
        weight = layers[0]._parameters["weight"]
        if problem := why_not_stored(f"{names[0]}.weight", weight, storage):
            self.kept.update(dict.fromkeys(names, problem))
        elif weight.dtype != dtype_named(storage):
            stored = StoredWeight(weight, storage, keep)
            for layer in layers:
                store(layer, stored)
            self._layers += layers
            self.stored.update(dict.fromkeys(names, storage))

    def compute(self, plan: ComputePlan, layers: Mapping[str, torch.nn.Module]) -> None:
        """Exchange the module's forward for one that follows a plan; :func:`apply` does it."""
        fused = {id(inner) for outer in self._module.modules() if isinstance(outer, FUSED) for inner in outer.modules()}
        reasons = {name: _why_not_planned(layer, id(layer) in fused) for name, layer in layers.items()}
        self.skipped.update((name, reason) for name, reason in reasons.items() if reason)
        self.without_effect += plan.without_effect
        planned = {name: layer for name, layer in layers.items() if not reasons[name]}
        decisions = {name: plan.decisions.get(name) or plan.following for name in planned}
        dtype = dtype_named(plan.activation_dtype)
        self._planned = PlannedLayers(decisions, planned, TorchLayers(parameters), dtype, plan.is_safe)
        self._planned.calibration.calibrating = bool(self._planned.operations)
        calls = Calls(self._planned.calibration if self._planned.operations else None)
        for inner in list(self._module.modules()):
            self._read_in(inner, dtype)
        for layer, _, forward in self._planned.patches:
            self._exchange(layer, PlannedForward(forward, calls))
        self._exchange(self._module, Called(self._module, dtype, calls))

    def _read_in(self, inner: torch.nn.Module, dtype: torch.dtype) -> None:
        """Have a module's tensors read in ``dtype``; an embedding would cast its whole table at each call."""
        tensors = (*inner._parameters.values(), *inner._buffers.values(), *inner._modules.values())
        if isinstance(inner, torch.nn.Embedding):
            self._exchange(inner, PlannedForward(CastResult(inner.forward, dtype), Calls(None)))
        elif not isinstance(inner, StoredWeight) and any(_has_other_dtype(tensor, dtype) for tensor in tensors):
            self._read.append(inner)
            read_in(inner, dtype)

    def _exchange(self, module: torch.nn.Module, forward: Callable) -> None:
        self._forwards.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def modes(self) -> dict[str, str]:
        """Map each layer that multiplies to the arithmetic it runs in, from its last call on for ``fp16_safe``.

        One of fp16, bf16, fp32, ``fp16_wide`` (fp16 operands, fp32 result) and ``fp16_scaled`` (the same, its input
        scaled by a power of two). Empty without a compute dtype.
        """
        return self._planned.observed_modes() if self._planned else {}

    def remove(self) -> None:
        """Put the module's forward and weights back. A second call does nothing."""
        while self._forwards:
            module, forward = self._forwards.pop()
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward
        with torch.inference_mode(False), torch.no_grad():
            give_back(self._layers)
        for inner in self._read:
            read_in(inner, None)
        self._layers, self._read = [], []
        if self._module.__dict__.get(HANDLE) is self:
            del self._module.__dict__[HANDLE]

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _known(settings: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    if unknown := sorted(set(settings) - set(names)):
        raise HalfsafeError(f"There is no setting {', '.join(unknown)}.", f"Use: {', '.join(names)}.")
    return settings


def _check(module: torch.nn.Module, compute: str | None, storage: str | None, rules: Rules) -> None:
    for setting, value, allowed in (("compute", compute, COMPUTE_DTYPES), ("storage", storage, STORAGE_DTYPES)):
        if value is not None and value not in allowed:
            raise HalfsafeError(
                f"{setting}='{value}' cannot be applied to a module.", f"Use one of: {', '.join(allowed)}."
            )
    if hasattr(module, "_orig_mod"):
        raise HalfsafeError("The module is compiled.", "Apply to the module that was given to torch.compile.")
    if any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules()):
        raise HalfsafeError(
            "The module, or a part of it, is scripted.", "Apply to the module that was given to torch.jit."
        )
    if HANDLE in module.__dict__:
        raise HalfsafeError("Something is applied to this module already.", "Remove it first: restore(module).")
    if compute and any(
        isinstance(inner.__dict__.get("forward"), (PlannedForward, Called)) for inner in module.modules()
    ):
        raise HalfsafeError(
            "The module or a part of it has a compute dtype.", "Apply one to the whole, with rules for its parts."
        )
    for rule in rules.own:
        for key, value in rule.settings:
            if value not in {"compute": COMPUTE_DTYPES, "storage": ("as_file", *STORAGE_DTYPES)}.get(key, (value,)):
                raise HalfsafeError(
                    f"The rule '{rule}' cannot be applied to a module.", "Take another value, or leave it out."
                )


def _holders(module: torch.nn.Module) -> list[list[str]]:
    """List, for each parameter, the modules that have it as ``weight``, and its names where it is none."""
    found: dict[int, list[str]] = {}
    for name, inner in module.named_modules():
        for key, parameter in inner._parameters.items():
            found.setdefault(id(parameter), []).append(name if key == "weight" else f"{name}.{key}")
    return list(found.values())


def _class_of(layer: torch.nn.Module) -> str:
    """Name a layer's class as rules and plans know it: subclasses of Linear multiply as Linear does."""
    return "Linear" if isinstance(layer, torch.nn.Linear) else type(layer).__name__


def _has_other_dtype(tensor: object, dtype: torch.dtype) -> bool:
    tensor = tensor.like if isinstance(tensor, StoredWeight) else tensor
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != dtype


def _why_not_planned(layer: torch.nn.Module, fused: bool) -> str:
    """Say why a layer has to run by its own forward; empty where it has not."""
    if fused:
        return "a fused kernel of torch reads its weight without calling it"
    if not type(layer).forward.__module__.startswith("torch.nn.modules.") or "forward" in layer.__dict__:
        return "it has a forward of its own"
    if not layer.weight.is_floating_point() or layer.weight.numel() == 0:
        return f"its weight is {name_of(layer.weight.dtype)} of {layer.weight.numel()} values"
    return "" if "weight" in layer._parameters or isinstance(layer._modules.get("weight"), StoredWeight) else COMPUTED


def _without_effect(
    specs: list[LayerSpec], rules: Rules, compute: str | None, storage: str | None
) -> Iterator[tuple[str, str]]:
    """Yield (rule, reason) for each of the user's rules that this call does not follow."""
    yield from rules_without_effect(specs, rules)
    followed = ("storage",) * bool(storage) + ("compute", "stream") * bool(compute)
    for rule in rules.own:
        ignored = [key for key, _ in rule.settings if key not in followed]
        if ignored:
            yield str(rule), f"this call sets no {' and no '.join(ignored)}"


def _plan(module: torch.nn.Module, specs: list[LayerSpec], compute: str, rules: Rules) -> ComputePlan:
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        name = name_of(parameter.dtype)
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    family = family_of({name: tuple(parameter.shape) for name, parameter in module.named_parameters()})
    facts = ModelFacts(tuple(specs), sum(sizes.values()), most(sizes), family.supported)
    device = next((parameter.device for parameter in module.parameters()), None)
    return plan_compute(facts, detect(device), compute, rules)
