"""A compute plan on a ModelPatcher: module forwards and attention are exchanged for the length of each model call."""

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import comfy.quant_ops
import torch
import torch.nn.functional as F
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.attention import SafeAttention
from ....precision.arithmetic.calibration import Calibration
from ....precision.arithmetic.compiling import compile_disabled
from ....precision.arithmetic.flags import flags_set, fp32_accumulation
from ....precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from ....precision.arithmetic.linear import SafeOperation, kind_of, matmul_flops
from ....precision.arithmetic.patching import Patch, patched
from ....precision.dtypes import dtype_named, name_of
from ....precision.formats.quantize import activation_scale
from ....precision.modes import FP8, FP16, FP16_WIDE, INT8, MODE_OF
from ....precision.plan.compute import ComputeDecision, ComputePlan
from ....precision.plan.fp16_results import largest_fp16_result
from ..facts.layers import is_quantized, modules_of
from .attention import attending, in_one_dtype, kernels_of
from .call import Call
from .conditions import Make, adapts_text, conditions_through
from .execution import switches_by_layer
from .modules import calling_layers, exchanged, has_own_forward, only_multiplies, quantized_weights, weights_of
from .per_model import PerModel
from .wrappers import COMPUTE, set_wrapper

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
ACTIVATION_LAYOUT = "TensorCoreFP8E4M3Layout"
FP8_RESULT = "bf16"
"""What fp8 products give an fp32 stream: torch has none with an fp32 result and a bias."""


def set_compute(patcher, plan: ComputePlan) -> None:
    """Make ``patcher``, a clone or a model just loaded, run as planned. An earlier plan is replaced.

    A plan that exchanges nothing adds no wrapper.
    """
    for kind in (WrappersMP.APPLY_MODEL, WrappersMP.OUTER_SAMPLE):
        patcher.remove_wrappers_with_key(kind, COMPUTE)
    compute = Compute(plan)
    patcher.set_attachments(COMPUTE, compute)
    if plan.decisions or plan.is_safe:
        set_wrapper(patcher, COMPUTE, compute)
        set_wrapper(patcher, COMPUTE, compute.sampling, WrappersMP.OUTER_SAMPLE)


def compute_of(patcher) -> "Compute | None":
    """The plan's executor on a patcher, if it has one."""
    return patcher.attachments.get(COMPUTE)


class Compute:
    """ComfyUI's APPLY_MODEL wrapper for one plan. It keeps what it learns of each model it runs, not the model."""

    def __init__(self, plan: ComputePlan):
        self.plan = plan
        self.runs: PerModel[PlannedLayers] = PerModel(lambda model: PlannedLayers(plan, model, fp16_results=plan.is_safe))
        self.adapters: PerModel[PlannedLayers] = PerModel(lambda model: PlannedLayers(plan, model))

    def __call__(self, executor, *args, **kwargs):
        run, call = self.runs.of(executor.class_obj), Call(executor, *args, **kwargs)
        with patched(run.patches), attending(executor.class_obj, call, run.attend):
            return run.call(call)

    def modes(self, patcher: "ModelPatcher") -> dict[str, str]:
        """Layer name -> mode, as found in the calls made so far."""
        run, adapter = self.runs.last_of(patcher), self.adapters.last_of(patcher)
        modes = {name: decision.mode for name, decision in self.plan.decisions.items()}
        modes |= run.modes() if run else {}
        return modes | ({name: mode for name, mode in adapter.modes().items() if adapter.calibration.flops[name]} if adapter else {})

    def modes_by_device(self, patcher: "ModelPatcher") -> dict[str, dict[str, str]]:
        """Device -> layer name -> mode, as found in the calls of each device that made some (MultiGPU)."""
        return {device: run.modes() for device, run in self.runs.by_device(patcher).items()}

    def sampling(self, executor, *args, **kwargs):
        """Around a sampler's run: what the model does with its text before its calls follows the plan too."""
        model = executor.class_obj.model_patcher.model
        if not adapts_text(model):
            return executor(*args, **kwargs)
        with conditions_through(model, functools.partial(self._conditions, model)):
            return executor(*args, **kwargs)

    def _conditions(self, model, make: Make) -> dict:
        run = self.adapters.of(model)
        with patched(run.patches):
            return run.call(make)

    def ranges(self, patcher: "ModelPatcher") -> dict[str, float]:
        """Layer name -> the largest magnitude it was given, of the layers that are watched."""
        run = self.runs.last_of(patcher)
        return run.calibration.largest() if run else {}

    def fp16_share_text(self, patcher: "ModelPatcher") -> str:
        """Say in one line what share of the matmul FLOPs has fp16 operands; empty before a call and without any."""
        run = self.runs.last_of(patcher)
        share = run.fp16_share() if run else None
        if share is None:
            return ""
        in_int8 = any(decision.mode == INT8.name for decision in self.plan.decisions.values())
        work = "matrix work outside of int8 layers" if in_int8 else "matrix work"
        return f"{share:.1%} of the {work} has fp16 operands; {run.calibration.repeats} calls were repeated"


class PlannedLayers:
    """One model under a plan: its patches and what its calls have shown.

    ``inside(name)``: whether one of the other modules can be given fp32 activations, where the plan mixes them in.
    ``fp16_results``: layers between a block's norms and its residual stream may return fp16.
    """

    def __init__(
        self, plan: ComputePlan, model, inside: Callable[[str], bool] = lambda name: True, fp16_results: bool = False
    ):
        named = modules_of(model)
        self.modules = {name: module for name, module in named.items() if name in plan.decisions}
        self._plan = plan
        self._model = weakref.ref(model)
        self.is_safe = plan.is_safe
        self.mixes_fp32_in = plan.mixes_fp32_in
        self.calibration = Calibration()
        self.calibration.results.allowed = fp16_results
        self.attention = SafeAttention(self.calibration)
        self.operations: dict[str, SafeOperation] = {}
        self.in_own_way: dict[str, CastOperation] = {}
        self.not_in_int8: dict[str, str] = {}
        self._by_layer = by_layer = [True]  # in a list: a closure over self would keep the layers until a garbage collection
        self._has_sums = any(plan.decisions[name].sums for name in self.modules)
        self.patches: list[Patch] = []
        for name, module in self.modules.items():
            decision = plan.decisions[name]
            if decision.mode == INT8.name and is_quantized(module):
                self.patches += _in_int8(module, decision)
                continue
            if decision.mode == INT8.name:
                self.not_in_int8[name] = MODE_OF[plan.choice.used]
                decision = replace(decision, mode=self.not_in_int8[name])
            forward = _summed(decision.sums, self._forward(name, module, decision), lambda: by_layer[0])
            self.patches += [*exchanged(module, forward), *_casting(module)]
        self.calling = calling_layers(self.modules.values())
        if plan.mixes_fp32_in:
            others = (module for name, module in named.items() if hasattr(module, "comfy_cast_weights") and inside(name))
            self.patches += [(module, "comfy_cast_weights", True) for module in others]

    def _forward(self, name: str, module: torch.nn.Module, decision: ComputeDecision):
        if decision.mode == FP8.name and not has_own_forward(module):
            return _out_as(decision, Fp8Linear(module))
        if decision.mode == FP16_WIDE.name and only_multiplies(module):
            largest = None if decision.stream == "fp32" else largest_fp16_result(name)
            operation = self.operations[name] = SafeOperation(
                module, self.calibration.scale(name), self.calibration, weights_of(module), largest_fp16=largest
            )
            # A method and not the object, for which torch.compile would make a graph of its own.
            return operation.__call__ if self.is_safe else _out_as(decision, operation.__call__)
        # Made inside of accumulation's wrapper, so this forward is accumulation's where that has one (wrappers.PLACES).
        cast = CastOperation(module, module.forward, _own_dtype(module, self._castable(decision.mode)), name, self.calibration)
        if name_of(cast.dtype) != decision.mode:
            self.in_own_way[name] = cast
        return _out_as(decision, cast)

    def _castable(self, mode: str) -> str:
        """``mode``, or what fp8 products give the stream: a LoRA in bypass mode has put its own forward around the layer's."""
        activations = self._plan.activation_dtype
        return mode if mode != FP8.name else FP8_RESULT if activations == "fp32" else activations

    def call(self, call: Call | Make):
        """One call of the model, or of its text adapter, its patches set; repeated with calibration when a magnitude left its range."""
        patcher = self._model().current_patcher
        off = needs_fp32_accumulation(self._plan, patcher)
        self._by_layer[0] = not self._has_sums or switches_by_layer(patcher)

        def once():
            self.attention.begin()
            plain = compile_disabled() if self.calibration.calibrating else nullcontext()
            with fp32_accumulation() if off else nullcontext(), plain, self.calling:
                return call()

        return self.calibration.run(once)

    @property
    def attend(self) -> Callable | None:
        """This plan's attention, to stand in front of whatever override is there already; None for a plan without one."""
        return self._attend if self.is_safe or self.mixes_fp32_in else None

    def _attend(self, function: Callable, attention: Callable, *args, **kwargs) -> torch.Tensor:
        if self.is_safe:
            return self.attention(kernels_of(function, attention), *args, **kwargs)
        return in_one_dtype(attention, *args, **kwargs)

    def modes(self) -> dict[str, str]:
        own = {name: name_of(operation.dtype) for name, operation in self.in_own_way.items()}
        return self.not_in_int8 | own | {name: operation.mode for name, operation in self.operations.items()}

    def fp16_share(self) -> float | None:
        flops = self.calibration.flops
        total = sum(flops.values())
        fp16 = sum(flops[name] for name, operation in self.operations.items() if not operation.scale.in_fp32)
        fp16 += self.attention.fp16_flops
        return fp16 / total if total else None


def needs_fp32_accumulation(plan: ComputePlan, patcher: "ModelPatcher") -> bool:
    """Tell whether to hold fp16 accumulation off for whole calls: some layer has fp32 results, and either no layer could
    accumulate in fp16 or the flag cannot be switched by layer. Otherwise each ``SafeOperation`` holds it off for itself."""
    modes = {decision.mode for decision in plan.decisions.values()}
    if FP16_WIDE.name not in modes:
        return False
    return (plan.is_safe and FP16.name not in modes) or not switches_by_layer(patcher)


def _own_dtype(module: torch.nn.Module, mode: str) -> torch.dtype:
    """The dtype a module that cannot be given fp16 operands runs in; torch's own cannot cast their weights."""
    if type(module).forward.__module__.startswith("torch.nn."):
        return module.weight.dtype
    return torch.float32 if mode == FP16_WIDE.name else dtype_named(mode)


class CastOperation:
    """Cast a module's input and call ``forward`` with it; ComfyUI's classes cast their weights to their input's dtype.

    Args:
        module: the layer.
        forward: what the module runs otherwise, accumulation's forward included (``wrappers.PLACES``).
    """

    def __init__(self, module: torch.nn.Module, forward: Callable, dtype: torch.dtype, name: str, calibration: Calibration):
        self.module = module
        self.forward = forward
        self.dtype = dtype
        self.name = name
        self.calibration = calibration

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        result = self.forward(x.to(self.dtype), *args, **kwargs)
        if self.calibration.calibrating:
            self.calibration.flops[self.name] += matmul_flops(result, self.module, kind_of(self.module))
        return result


class Fp8Linear:
    """ComfyUI's fp8 Linear with the activation scale taken from the activation, instead of 1.0 or the file's.

    Activations are in e4m3fn beside weights in either format: CUDA multiplies no e5m2 by e5m2 ("Multiplication of two
    Float8_e5m2 matrices is not supported", ``aten/src/ATen/native/cuda/ScaledBlas.cpp``).
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: the module's input; fp32 is multiplied into bf16 (``FP8_RESULT``)."""
        module = self.module
        dtype = dtype_named(FP8_RESULT) if x.dtype == torch.float32 else x.dtype
        if has_changed_weight(module):
            return type(module).forward(module, x.to(dtype))
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        scale = activation_scale(rows, torch.float8_e4m3fn)
        quantized = comfy.quant_ops.QuantizedTensor.from_float(rows, ACTIVATION_LAYOUT, scale=scale)
        with quantized_weights(module, rows) as (weight, bias):
            return F.linear(quantized, weight, bias).reshape(*x.shape[:-1], -1)


def has_changed_weight(module: torch.nn.Module) -> bool:
    """Tell whether a LoRA is added at each call, or has left the weight in 16 bit."""
    return not is_quantized(module) or bool(module.weight_function or module.bias_function)


def _out_as(decision: ComputeDecision, forward):
    def run(x, *args, **kwargs):
        return forward(x, *args, **kwargs).to(torch.float32 if decision.stream == "fp32" else x.dtype)

    return run


def _in_int8(module: torch.nn.Module, decision: ComputeDecision) -> list[Patch]:
    """What makes ComfyUI's int8 layer multiply in int8 though the model's compute dtype was changed, which would else
    dequantize it (``comfy_force_cast_weights``). With an fp32 result its input is cast: a result in the dtype of a 16-bit
    input would be rounded, or past fp16's range, before it is widened."""
    kept = [(module, "comfy_force_cast_weights", False)]
    forward = module.forward
    return [*kept, (module, "forward", lambda x: forward(x.float()))] if decision.stream == "fp32" else kept


def _summed(sums: str, forward, by_layer: Callable[[], bool]):
    """Run ``forward`` with the accumulation that a rule asks for, where ``by_layer()``: flags are the whole process's, so that
    another thread's layers would have it too, and a compiled graph cannot switch them."""
    if not sums:
        return forward

    def run(*args, **kwargs):
        if torch.compiler.is_compiling() or not by_layer():
            return forward(*args, **kwargs)
        with flags_set({FP16_ACCUMULATION: sums == "fp16"}):
            return forward(*args, **kwargs)

    return run


def _casting(module: torch.nn.Module) -> list[Patch]:
    """What makes a core operation cast its weights to its input's dtype."""
    return [(module, "comfy_cast_weights", True)] if hasattr(module, "comfy_cast_weights") else []
