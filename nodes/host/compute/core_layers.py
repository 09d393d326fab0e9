"""Apply a plan to a model's layers: the forward that replaces each layer's own, and the operations in it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ....precision.arithmetic.calibration import Calibration
from ....precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from ....precision.arithmetic.linear import SafeOperation, matmul_flops
from ....precision.base.dtypes import dtype_named, name_of
from ....precision.base.flags import flags_set
from ....precision.base.layers import kind_of
from ....precision.base.message import Message
from ....precision.base.modes import FP8, FP16, FP16_WIDE, FP32, INT8, MODE_OF
from ....precision.base.patching import Patch
from ....precision.formats.layer_plan import LayerPlan
from ....precision.plan.compute import ComputePlan
from ..comfyui.attributes import FULL_PRECISION, casting, is_forced_to_cast, not_forced_to_cast, quantization_format
from ..comfyui.gate import entering, ran_own
from ..comfyui.layers import is_quantized
from ..comfyui.weights import Bound, exchanged, only_multiplies, weights_of
from .borders import casts_itself, crossing
from .bound import FP8_RESULT, Fp8Linear, Int8Linear

Forward = Callable[..., torch.Tensor]


class PlannedLayers:
    """Replace the forwards of a model's layers according to a plan, and record the modes of their calls.

    ``switches_flags``: torch's flags are switched layer by layer in the calls of the model.
    """

    def __init__(self, plan: ComputePlan, layers: Mapping[str, torch.nn.Module]):
        self.calibration = Calibration()
        self.switches_flags = True
        self.operations: dict[str, SafeOperation] = {}
        self.casts: dict[str, CastOperation] = {}
        self.fp8: dict[str, Fp8Linear] = {}
        self.patches: list[Patch] = []
        self._activations, self._safe = plan.activation_dtype, plan.is_safe
        holds = holds_sums(plan)
        self._decisions: dict[str, LayerPlan] = {}
        for name, layer in layers.items():
            decision = self._decisions[name] = plan.decisions[name]
            if decision.mode == INT8.name:  # its weight is not stored in int8: it computes as the other layers do
                decision = self._decisions[name] = replace(decision, mode=MODE_OF[plan.choice.used])
            own = CastOperation(name, layer, self._own_dtype(layer, decision.mode), self.calibration)
            product = self._product(name, layer, decision)
            if product is None:
                self.casts[name] = own
            calls_own = self._finished(own.__call__, name, decision)
            forward = self._finished(product, name, decision) if product else calls_own
            self.patches += exchanged(layer, forward, calls_own if product else None, fp16_sums=not holds)
            self.patches += casting(layer)

    def _product(self, name: str, layer: torch.nn.Module, decision: LayerPlan) -> Forward | None:
        """Create the layer's product as a bound method; torch.compile would compile a separate graph for an object.
        None for a layer that calls its own forward."""
        if decision.mode == FP8.name and only_multiplies(layer):
            self.fp8[name] = Fp8Linear(layer)
            return self.fp8[name].__call__
        if decision.mode == FP16_WIDE.name and only_multiplies(layer):
            scale, weights = self.calibration.scale(name), weights_of(layer)
            self.operations[name] = SafeOperation(layer, scale, self.calibration, weights)
            return self.operations[name].__call__
        return None

    def _finished(self, forward: Forward, name: str, decision: LayerPlan) -> Forward:
        """Return a forward with its result in the plan's dtype, and its sums as a rule requests."""
        as_given = isinstance(forward.__self__, Fp8Linear) and decision.stream != FP32.name  # type: ignore[attr-defined]
        if not (as_given or (self._safe and name in self.operations)):
            forward = CastResult(forward, torch.float32 if decision.stream == FP32.name else None).__call__
        return self._with_sums(decision.sums, forward) if decision.sums else forward

    def _with_sums(self, sums: str, inner: Forward) -> Forward:
        """Wrap a forward in the accumulation that a rule of the user requests. It has no effect if flags are switched
        for whole calls: flags apply to the whole process, so another thread's layers would use them too, and a compiled
        graph cannot switch them."""

        def forward(*args, **kwargs) -> torch.Tensor:
            if torch.compiler.is_compiling() or not self.switches_flags:
                return inner(*args, **kwargs)
            with flags_set({FP16_ACCUMULATION: sums == "fp16"}):
                return inner(*args, **kwargs)

        return forward

    def _own_dtype(self, layer: torch.nn.Module, mode: str) -> torch.dtype:
        if mode == FP8.name:  # a LoRA in bypass mode has put its own forward around the layer's
            mode = FP8_RESULT if self._activations == FP32.name else self._activations
        dtype = torch.float32 if mode == FP16_WIDE.name else dtype_named(mode)
        if type(layer).forward.__module__.startswith("torch.nn."):
            return torch.promote_types(layer.weight.dtype, dtype)  # torch's own classes cannot cast their weights
        return dtype

    def __repr__(self) -> str:
        """One line per layer: its operation, mode, operand scale and reason."""
        modes = self.observed_modes()
        lines = [f"{name}: {modes[name]}, {self.repr_of(name)}. {self._decisions[name].reason}" for name in modes]
        return "\n".join([f"{len(lines)} layers with a plan", *lines])

    def repr_of(self, name: str) -> str:
        """Describe the operation of a layer, for the log."""
        if name not in self.operations:
            return type(self.casts[name]).__name__ if name in self.casts else Fp8Linear.__name__
        operation = self.operations[name]
        watched = "result looked at in each call" if operation.finite else "result not looked at"
        scale = operation.scale
        return f"operand times 2^-{scale.exponent}, largest {scale.largest:.3g}, {watched}"

    def planned_modes(self) -> dict[str, str]:
        """Return layer -> the mode its forward was created for; the same before and after any call."""
        modes = {name: decision.mode for name, decision in self._decisions.items()}
        return modes | {name: name_of(cast.dtype) for name, cast in self.casts.items()}

    def observed_modes(self) -> dict[str, str]:
        """Return layer -> the mode it ran in at its last calibration."""
        found = {name: operation.observed_mode for name, operation in self.operations.items()}
        own = {name: FP32.name for name, operation in self.operations.items() if ran_own(operation.module)}
        return self.planned_modes() | found | own

    def allocations(self) -> dict[str, object]:
        """Return layer -> everything its allocations depend on: its mode, and whether its operand is watched."""
        watched = {
            name: (each.observed_mode, each.scale.is_watched, each.finite is None)
            for name, each in self.operations.items()
        }
        return {**self.planned_modes(), **watched}

    @property
    def fp16_flops(self) -> int:
        """Floating-point operations of a call with fp16 operands that cannot overflow."""
        return sum(self.calibration.flops[name] for name, each in self.operations.items() if not each.scale.in_fp32)


def holds_sums(plan: ComputePlan) -> bool:
    """True if fp16 accumulation is switched off for whole calls, because no layer of a safe plan could accumulate in
    fp16."""
    modes = {decision.mode for decision in plan.decisions.values()}
    return plan.is_safe and FP16_WIDE.name in modes and FP16.name not in modes


class CastOperation:
    """Cast the input and call the layer's current forward; ComfyUI layers cast their weights to the input's dtype.

    The forward is read after accumulation's stage was applied, so it is accumulation's forward if the layer has one
    (``interceptor.IN_CALLS``).
    """

    def __init__(self, name: str, layer: torch.nn.Module, dtype: torch.dtype, calibration: Calibration):
        self.name = name
        self.layer = layer
        inner = bound_forward(layer)
        self.inner = inner if casts_itself(layer) else crossing(inner, Message("'{0}'", name))
        self.dtype = dtype
        self.calibration = calibration

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        result = self.inner(input.to(self.dtype), *args, **kwargs)
        if self.calibration.calibrating and (kind := kind_of(self.layer)):
            self.calibration.flops[self.name] += matmul_flops(result, self.layer, kind)
        return result


class CastResult:
    """Cast the result of another forward to ``dtype``; None: to the dtype of its first argument."""

    def __init__(self, inner: Forward, dtype: torch.dtype | None):
        self.inner = inner
        self.dtype = dtype

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        return self.inner(*args, **kwargs).to(self.dtype or args[0].dtype)


def int8_patches(module: torch.nn.Module, decision: LayerPlan, activations: str) -> list[Patch]:
    """Patches that let ComfyUI's int8 layer multiply in int8 although the model's compute dtype was changed, which
    would dequantize it (``comfy_force_cast_weights``). ``activations``: the dtype between layers.

    For an fp32 result the input is cast to fp32: a result in the dtype of a 16-bit input would be rounded, or overflow
    fp16, before it is widened. ComfyUI's kernel with a fused activation dequantizes a weight whose dtype differs from
    the input's, so the gate then computes the activation; otherwise ComfyUI's own kernel runs.
    """
    kept = [not_forced_to_cast(module)]
    forward = bound_forward(module, Int8Linear)
    if decision.stream == FP32.name:

        def in_fp32(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            return forward(x.float(), *args, **kwargs)

        return [*kept, (module, "forward", entering(module, in_fp32))]
    unfused = forward if name_of(module.weight.dtype) == activations else entering(module, forward)
    return kept if unfused == module.forward else [*kept, (module, "forward", unfused)]


def bound_forward(layer: torch.nn.Module, product: type[Bound] = Bound) -> Forward:
    """Return the forward of a quantized layer with its kernels looked up once; the layer's own forward for others."""
    if is_quantized(layer) and only_multiplies(layer):
        return product(layer).__call__
    return layer.forward


def is_unpacked(layer: torch.nn.Module) -> bool:
    """True if ComfyUI's forward unpacks the layer's fp8 weight to the dtype of its input."""
    unpacks = getattr(layer, FULL_PRECISION, False) or is_forced_to_cast(layer)
    return unpacks and is_fp8(layer) and only_multiplies(layer)


def is_fp8(layer: torch.nn.Module) -> bool:
    """True if the weight of a layer is fp8 with a scale."""
    return is_quantized(layer) and quantization_format(layer).startswith("float8")
