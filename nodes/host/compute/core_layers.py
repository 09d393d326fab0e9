"""Apply a plan to a model's layers: the forward that replaces each layer's own, and the operations
in it."""

from collections.abc import Mapping
from types import MethodType

import comfy.ops
import torch

from ....precision.arithmetic.calibration import Calibration
from ....precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from ....precision.arithmetic.linear import SafeOperation
from ....precision.base.dtypes import dtype_named, name_of
from ....precision.base.flags import flags_set
from ....precision.base.message import Message
from ....precision.base.modes import FP8, FP16, FP16_WIDE, FP32, INT8, MODE_OF
from ....precision.base.patching import Patch
from ....precision.formats.layer_plan import LayerPlan
from ....precision.plan.compute import ComputePlan
from ..comfyui.attributes import FORCED_TO_CAST, FULL_PRECISION, casting, quantization_format
from ..comfyui.gate import Forward
from ..comfyui.layer_forward import GIVEN, LayerForward, Sums
from ..comfyui.layers import is_quantized
from ..comfyui.weights import Bound, exchanged, multiplies_in_fp8, only_multiplies, weights_of
from .borders import casts_itself, crossing
from .bound import FP8_RESULT, Fp8Linear, Int8Linear


class PlannedLayers:
    """Replace the forwards of a model's layers according to a plan, and record the modes of their
    calls.

    ``switches_flags``: torch's flags are switched layer by layer in the calls of the model.
    """

    def __init__(self, plan: ComputePlan, layers: Mapping[str, torch.nn.Module]):
        self.calibration = Calibration()
        self.switches_flags = True
        self.forwards: dict[str, LayerForward] = {}
        self.operations: dict[str, SafeOperation] = {}
        self.fp8: dict[str, Fp8Linear] = {}
        self.patches: list[Patch] = []
        self._safe = plan.is_safe
        holds = holds_sums(plan)
        self._decisions = {name: plan.decisions[name] for name in layers}
        for name, layer in layers.items():
            forward = self.forwards[name] = self._forward(name, layer, plan)
            self.patches += exchanged(forward, fp16_sums=not holds)
            self.patches += casting(layer)

    @staticmethod
    def products(name: str, layer: torch.nn.Module, plan: ComputePlan) -> tuple[str, torch.dtype]:
        """Return what a plan multiplies a layer in: the mode of a product of ours, "" for none; and
        the dtype of the input of the layer's own forward, which runs without one."""
        mode: str = plan.decisions[name].mode
        if mode == INT8.name:  # its weight is not stored in int8: it computes as the other layers do
            mode = MODE_OF[plan.choice.used]
        bound = mode if mode in (FP8.name, FP16_WIDE.name) and only_multiplies(layer) else ""
        if mode == FP8.name:  # a LoRA in bypass mode has put its own forward around the layer's
            mode = FP8_RESULT if plan.is_in_fp32 else plan.activation_dtype
        dtype = torch.float32 if mode == FP16_WIDE.name else dtype_named(mode)
        if type(layer).forward.__module__.startswith("torch.nn."):
            dtype = torch.promote_types(layer.weight.dtype, dtype)  # torch's own classes cannot cast their weights
        return bound, dtype

    def _forward(self, name: str, layer: torch.nn.Module, plan: ComputePlan) -> LayerForward:
        """Create the forward of a layer: a product of ours, or the layer's own with values in the
        plan's dtypes."""
        decision = plan.decisions[name]
        product, dtype = self.products(name, layer, plan)
        result = torch.float32 if decision.stream == FP32.name else GIVEN
        ruled = self._ruled(decision.sums) if decision.sums else None
        own = self._own(name, layer, dtype, result, ruled)
        if product == FP8.name:
            fp8 = self.fp8[name] = Fp8Linear(layer)
            wide = None if result == GIVEN else result
            return LayerForward(layer, fp8.__call__, result=wide, sums=ruled, otherwise=own)
        if product == FP16_WIDE.name:
            scale, weights = self.calibration.scale(name), weights_of(layer)
            safe = self.operations[name] = SafeOperation(layer, scale, self.calibration, weights)
            return LayerForward(layer, safe.__call__, result=None if self._safe else result, sums=ruled, otherwise=own)
        return own

    def _own(
        self, name: str, layer: torch.nn.Module, dtype: torch.dtype, result: torch.dtype | str, ruled: Sums | None
    ) -> LayerForward:
        """Create the forward that casts the input and calls what was found on a layer; ComfyUI's
        layers cast their weights to their input's dtype. Sums that accumulation tries are kept, so
        that it sees the operand."""
        product, found = bound_forward(layer), LayerForward.on(layer)
        if not casts_itself(layer):
            product = crossing(product, Message("'{0}'", name))
        own = LayerForward(layer, product, dtype, result, ruled, counted=(self.calibration, name))
        if ruled or found.sums is None:
            return own
        return LayerForward(layer, product, dtype, result, found.sums, otherwise=own, counted=(self.calibration, name))

    def _ruled(self, sums: str) -> Sums:
        """Return the accumulation that a rule of the user requests. It has no effect if flags are
        switched for whole calls: flags apply to the whole process, so another thread's layers would
        use them too, and a compiled graph cannot switch them."""

        def run(product: Forward, *args, **kwargs) -> torch.Tensor:
            if torch.compiler.is_compiling() or not self.switches_flags:
                return product(*args, **kwargs)
            with flags_set({FP16_ACCUMULATION: sums == "fp16"}):
                return product(*args, **kwargs)

        return run

    def __repr__(self) -> str:
        """One line per layer: its operation, mode, operand scale and reason."""
        named = self.forwards.items()
        lines = [f"{name}: {each.mode}, {self.repr_of(name)}. {self._decisions[name].reason}" for name, each in named]
        return "\n".join([f"{len(lines)} layers with a plan", *lines])

    def repr_of(self, name: str) -> str:
        """Describe the operation of a layer, for the log."""
        if name not in self.operations:
            return repr(self.forwards[name])
        operation = self.operations[name]
        watched = "result looked at in each call" if operation.finite else "result not looked at"
        scale = operation.scale
        return f"operand times 2^-{scale.exponent}, largest {scale.largest:.3g}, {watched}"

    def allocations(self) -> dict[str, object]:
        """Return layer -> everything its allocations depend on: its mode, and whether its operand
        is watched."""
        watched = {
            name: (each.mode, each.scale.is_watched, each.finite is None) for name, each in self.operations.items()
        }
        return {**{name: forward.mode for name, forward in self.forwards.items()}, **watched}

    @property
    def fp16_flops(self) -> int:
        """Floating-point operations of a call with fp16 operands that cannot overflow."""
        return sum(self.calibration.flops[name] for name, each in self.operations.items() if not each.scale.in_fp32)


def holds_sums(plan: ComputePlan) -> bool:
    """True if fp16 accumulation is switched off for whole calls, because no layer of a safe plan
    could accumulate in fp16."""
    modes = {decision.mode for decision in plan.decisions.values()}
    return plan.is_safe and FP16_WIDE.name in modes and FP16.name not in modes


def int8_patches(module: torch.nn.Module, decision: LayerPlan, activations: str) -> list[Patch]:
    """Patches that let ComfyUI's int8 layer multiply in int8 although the model's compute dtype was
    changed, which would dequantize it (``comfy_force_cast_weights``). ``activations``: the dtype
    between layers.

    For an fp32 result the input is cast to fp32: a result in the dtype of a 16-bit input would be
    rounded, or overflow fp16, before it is widened. ComfyUI's kernel with a fused activation
    dequantizes a weight whose dtype differs from the input's, so the gate then computes the
    activation; otherwise ComfyUI's own kernel runs."""
    kept, product = [(module, FORCED_TO_CAST, False)], bound_forward(module, Int8Linear)
    if decision.stream == FP32.name:
        return [*kept, *LayerForward(module, product, operand=torch.float32).put_on()]
    fuses = name_of(module.weight.dtype) == activations
    forward = LayerForward(module, product, gated=not fuses)
    return kept if forward.entrance == module.forward else [*kept, *forward.put_on()]


def bound_forward(layer: torch.nn.Module, product: type[Bound] = Bound) -> Forward:
    """Return the product of a quantized layer with its kernels looked up once; for others, the
    forward that was found on the layer, which multiplies in the dtype of its input."""
    if is_quantized(layer) and only_multiplies(layer):
        return product(layer).__call__
    if multiplies_in_fp8(layer) and only_multiplies(layer):
        return MethodType(comfy.ops.manual_cast.Linear.forward_comfy_cast_weights, layer)
    return LayerForward.on(layer).product


def is_unpacked(layer: torch.nn.Module) -> bool:
    """True if ComfyUI's forward unpacks the layer's fp8 weight to the dtype of its input."""
    unpacks = getattr(layer, FULL_PRECISION, False) or getattr(layer, FORCED_TO_CAST, False)
    return unpacks and is_fp8(layer) and only_multiplies(layer)


def is_fp8(layer: torch.nn.Module) -> bool:
    """True if the weight of a layer is fp8 with a scale."""
    return is_quantized(layer) and quantization_format(layer).startswith("float8")
