"""Storage and compute dtypes on any ``torch.nn.Module``: put on with one call, taken off with another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..arithmetic.linear import kind_of
from ..devices.detect import detect
from ..dtypes import COMPUTE_OPTIONS, STORAGE_OPTIONS, name_of
from ..errors import HalfsafeError
from ..formats.families import family_of
from ..plan.compute import ComputePlan, plan_compute
from ..plan.facts import LayerSpec, ModelFacts, most
from ..plan.rules import Rules, rules_from
from ..plan.storage import StorageDecision, plan_storage
from .computation import CastOperation, Computation
from .weights import StoredWeights

COMPUTE_DTYPES = tuple(option for option in COMPUTE_OPTIONS if option not in ("fp8", "int8"))
STORAGE_DTYPES = tuple(option for option in STORAGE_OPTIONS[2:] if option != "int8")
# Torch's fused kernels read the weights of these modules' layers without a call of their forward.
FUSED = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
HANDLE = "_halfsafe_applied"


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

    ``compute`` exchanges the forward of the module for one that casts floating inputs and, for the length of a call,
    exchanges those of its layers; its result is in the activation dtype, which is fp32 for ``fp16_safe``. ``storage``
    exchanges the weights of its Linear and convolution layers, which then also work when called one by one.

    Args:
        module: in evaluation mode, in any dtype and on any device; not compiled.
        settings: the other arguments as a mapping of plain data, such as ``{"compute": "fp16_safe", "storage": "fp8_e4m3fn"}``,
            which win over those given by name; :func:`portable_apply` takes them to another process.
        compute: ``fp16_safe`` (fp16 matmul operands, fp32 between layers, cannot overflow), ``fp16``, ``bf16``, ``fp32``,
            or ``auto`` for what the module's device is fast at. None leaves the arithmetic alone.
        storage: ``fp8_e4m3fn`` or ``fp8_e5m2`` with one scale per tensor (Linear layers only), ``fp16``, ``bf16`` or
            ``fp32``. None leaves the weights alone.
        rules: exceptions per layer, as text on top of the default preset, which keeps sensitive layers out of fp8, or from
            :func:`rules_from`.
        keep: hold the original weights in host memory, so that ``remove()`` restores them bit by bit. Without it,
            ``remove()`` can only return what the storage dtype holds, in the original dtype.

    Raises:
        HalfsafeError: no such setting or dtype, the module is compiled or has been applied to already, or a weight holds NaN or Inf.
            The module is as it was.

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
    _check(module, compute, storage)
    return _put_on(module, compute, storage, rules if isinstance(rules, Rules) else rules_from(rules), keep)


def _put_on(module: torch.nn.Module, compute: str | None, storage: str | None, rules: Rules, keep: bool) -> Applied:
    """Plan and exchange; put everything back where that fails."""
    layers, skipped = _layers(module)
    specs = [LayerSpec(name, type(layer).__name__, tuple(layer.weight.shape)) for name, layer in layers.items()]
    applied = Applied(module, skipped, keep)
    try:
        with torch.inference_mode(False), torch.no_grad():
            if storage:
                applied.store(layers, plan_storage(specs, storage, rules))
            if compute:
                applied.compute(_plan(module, specs, compute, rules), layers)
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
        kept: layer name -> why its weight is not stored as asked.
        skipped: layer name -> why it runs by its own forward.

    fp8 storage, as a context; ``keep`` makes the way back exact:

    >>> import torch
    >>> from halfsafe.precision import apply
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).eval()
    >>> before = model[0].weight.clone()
    >>> with apply(model, storage="fp8_e4m3fn", rules="2 storage=bf16", keep=True), torch.inference_mode():
    ...     y = model(torch.randn(4, 64))
    ...     [str(model[index].weight.dtype) for index in (0, 2)]
    ['torch.float8_e4m3fn', 'torch.bfloat16']
    >>> torch.equal(model[0].weight, before)
    True
    """

    def __init__(self, module: torch.nn.Module, skipped: Mapping[str, str], keep: bool):
        self.kept: dict[str, str] = {}
        self.skipped = dict(skipped)
        self._module = module
        self._stored = StoredWeights(keep)
        self._computation: Computation | None = None
        self._forwards: list[tuple[torch.nn.Module, Callable | None]] = []
        module.__dict__[HANDLE] = self

    def store(self, layers: Mapping[str, torch.nn.Module], decisions: Mapping[str, StorageDecision]) -> None:
        """Exchange the weights of layers as decided; :func:`apply` does it."""
        self.kept.update((name, decision.reason) for name, decision in decisions.items() if decision.kept)
        for name, decision in decisions.items():
            if decision.storage == "as_file":
                continue
            if problem := self._stored.exchange(name, layers[name], decision.storage):
                self.kept[name] = problem
            else:
                self._exchange(layers[name], CastOperation(layers[name], self._stored.lend))

    def compute(self, plan: ComputePlan, layers: Mapping[str, torch.nn.Module]) -> None:
        """Exchange the module's forward for one that follows a plan; :func:`apply` does it."""
        self._computation = Computation(self._module, plan, layers, self._stored.lend)
        self._exchange(self._module, self._computation)

    def _exchange(self, module: torch.nn.Module, forward: Callable) -> None:
        self._forwards.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def modes(self) -> dict[str, str]:
        """Map each layer that multiplies to the arithmetic it runs in, from its last call on for ``fp16_safe``.

        One of fp16, bf16, fp32, ``fp16_wide`` (fp16 operands, fp32 result) and ``fp16_scaled`` (the same, its input
        scaled by a power of two). Empty without a compute dtype.
        """
        return self._computation.modes() if self._computation else {}

    def remove(self) -> None:
        """Put the module's forward and weights back. A second call does nothing."""
        while self._forwards:
            module, forward = self._forwards.pop()
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward
        with torch.inference_mode(False), torch.no_grad():
            self._stored.put_back()
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


def _check(module: torch.nn.Module, compute: str | None, storage: str | None) -> None:
    for setting, value, allowed in (("compute", compute, COMPUTE_DTYPES), ("storage", storage, STORAGE_DTYPES)):
        if value is not None and value not in allowed:
            raise HalfsafeError(f"{setting}='{value}' cannot be applied to a module.", f"Use one of: {', '.join(allowed)}.")
    if hasattr(module, "_orig_mod"):
        raise HalfsafeError("The module is compiled.", "Apply to the module that was given to torch.compile.")
    if HANDLE in module.__dict__:
        raise HalfsafeError("Something is applied to this module already.", "Remove it first: restore(module).")


def _layers(module: torch.nn.Module) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """Collect the Linear and convolution layers by name, and (name, reason) of those that have to run by themselves."""
    fused = {id(inner) for outer in module.modules() if isinstance(outer, FUSED) for inner in outer.modules()}
    layers, skipped = {}, {}
    for name, layer in module.named_modules():
        if kind_of(layer) is None:
            continue
        if id(layer) in fused:
            skipped[name] = "a fused kernel of torch reads its weight without calling it"
        elif not type(layer).forward.__module__.startswith("torch.nn.modules.") or "forward" in layer.__dict__:
            skipped[name] = "it has a forward of its own"
        elif "weight" not in layer._parameters:
            skipped[name] = "its weight is computed from others"
        else:
            layers[name] = layer
    return layers, skipped


def _plan(module: torch.nn.Module, specs: list[LayerSpec], compute: str, rules: Rules) -> ComputePlan:
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        name = name_of(parameter.dtype)
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    family = family_of(name for name, _ in module.named_parameters())
    facts = ModelFacts(tuple(specs), sum(sizes.values()), most(sizes), family.supported)
    device = next((parameter.device for parameter in module.parameters()), None)
    return plan_compute(facts, detect(device), compute, rules)
