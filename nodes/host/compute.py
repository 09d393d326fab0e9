"""A compute plan on a ModelPatcher: module forwards and attention are exchanged for the length of each model call."""

import contextlib
import logging
import weakref
from collections.abc import Iterator

import comfy.ops
import comfy.quant_ops
import torch
from comfy.patcher_extension import WrappersMP

from ...precision.compute_plan import ComputeDecision, ComputePlan
from ...precision.dtypes import dtype_named
from ...precision.operations import SafeAttention, SafeOperation
from ...precision.patching import Patch, patched
from ...precision.quantize import activation_scale
from ...precision.ranges import Ranges

KEY = "halfsafe.compute"
OVERRIDE = "optimized_attention_override"
logger = logging.getLogger("halfsafe")


def set_compute(patcher, plan: ComputePlan) -> None:
    """Make ``patcher``, a clone or a model just loaded, run as planned. An earlier plan is replaced.

    A plan that exchanges nothing adds no wrapper.
    """
    patcher.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    compute = Compute(plan)
    patcher.set_attachments(KEY, compute)
    if plan.decisions or plan.safe:
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, compute)


def compute_of(patcher) -> "Compute | None":
    """The plan's executor on a patcher, if it has one."""
    return patcher.attachments.get(KEY)


class Compute:
    """ComfyUI's APPLY_MODEL wrapper for one plan. It keeps what it learns of each model it runs, not the model."""

    def __init__(self, plan: ComputePlan):
        self.plan = plan
        self._runs: weakref.WeakKeyDictionary[torch.nn.Module, _Run] = weakref.WeakKeyDictionary()

    def __call__(self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        run = self.run_of(executor.class_obj)
        options = run.options(transformer_options or {})

        def call():
            run.attention.begin()
            with _eager(run.ranges.measuring):
                return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

        with patched(run.patches):
            return run.ranges.run(call)

    def run_of(self, model) -> "_Run":
        """What is known of a model whose weights are as they are now."""
        weights = (model.current_weight_patches_uuid, getattr(model.current_patcher, "current_hooks", None))
        run = self._runs.get(model)
        if run is None or run.weights != weights:
            run = self._runs[model] = _Run(self.plan, model.diffusion_model, weights)
        return run

    def modes(self, model) -> dict[str, str]:
        """Layer name -> mode, as found in the calls made so far."""
        run = self._runs.get(model)
        modes = {name: decision.mode for name, decision in self.plan.decisions.items()}
        return modes if run is None else {**modes, **run.modes()}

    def work(self, model) -> str:
        """One line on the matrix work done with fp16 operands; empty where none was planned or measured."""
        run = self._runs.get(model)
        share = run.fp16_share() if run else None
        if share is None:
            return ""
        return f"{share:.1%} of the matrix work has fp16 operands; {run.ranges.repeats} calls were repeated"


class _Run:
    def __init__(self, plan: ComputePlan, diffusion_model: torch.nn.Module, weights: tuple):
        self.weights = weights
        self.safe = plan.safe
        self.ranges = Ranges()
        self.attention = SafeAttention(self.ranges)
        self.operations: dict[str, SafeOperation] = {}
        self.patches: list[Patch] = []
        modules = dict(getattr(diffusion_model, "_orig_mod", diffusion_model).named_modules())
        for name, decision in plan.decisions.items():
            if name in modules:
                self._patch(name, modules[name], decision)

    def _patch(self, name: str, module: torch.nn.Module, decision: ComputeDecision) -> None:
        forward = self._forward(name, module, decision)
        self.patches += [(module, "forward", forward), *_switches(module)]

    def _forward(self, name: str, module: torch.nn.Module, decision: ComputeDecision):
        if decision.mode == "fp8":
            return _out_as(decision, Fp8Linear(module))
        if decision.mode == "fp16_wide" and _is_core_operation(module):
            operation = SafeOperation(module, self.ranges.slot(name), self.ranges, core_weights)
            self.operations[name] = operation
            return operation if self.safe else _out_as(decision, operation)
        dtype = torch.float32 if decision.mode == "fp16_wide" else dtype_named(decision.mode)
        return _out_as(decision, _in_dtype(module.forward, dtype))

    def options(self, options: dict) -> dict:
        """``transformer_options`` with fp16 attention in front of whatever override is there already."""
        if not self.safe:
            return options
        previous = options.get(OVERRIDE)

        def override(function, *args, **kwargs):
            def attention(*inner_args, **inner):
                if previous is not None:
                    return previous(function, *inner_args, **inner)
                return function(*inner_args, **inner)

            return self.attention(attention, *args, **kwargs)

        return {**options, OVERRIDE: override}

    def modes(self) -> dict[str, str]:
        return {name: _mode(operation) for name, operation in self.operations.items()}

    def fp16_share(self) -> float | None:
        full = sum(op.slot.work for op in self.operations.values() if op.full)
        total = sum(slot.work for slot in self.ranges.slots.values()) + self.attention.full_work
        return (total - full - self.attention.full_work) / total if total else None


def _mode(operation: SafeOperation) -> str:
    if operation.full:
        return "fp32"
    return "fp16_scaled" if operation.slot.exponent else "fp16_wide"


def _is_core_operation(module: torch.nn.Module) -> bool:
    """Whether ComfyUI's own forward of this class only casts the weights and multiplies."""
    return type(module).forward.__module__ == comfy.ops.__name__ and not hasattr(module, "pre_quant_scale")


@contextlib.contextmanager
def core_weights(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple]:
    """The module's weight in ``dtype`` and bias in fp32 through ComfyUI's cast: offload, LoRA and quantization included."""
    comfy.ops.run_every_op()
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, dtype=dtype, device=x.device, bias_dtype=torch.float32, offloadable=True
    )
    try:
        yield weight, bias
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


class Fp8Linear:
    """ComfyUI's fp8 Linear with the activation scale taken from the activation, instead of 1.0 or the file's."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module, rows = self.module, x.reshape(-1, x.shape[-1])
        if module.weight_function or module.bias_function:
            return type(module).forward(module, x)
        comfy.ops.run_every_op()
        scale = activation_scale(rows, module.weight._qdata.dtype)
        quantized = comfy.quant_ops.QuantizedTensor.from_float(rows, module.layout_type, scale=scale)
        result = module.forward_comfy_cast_weights(quantized, x.dtype, want_requant=True)
        return result.reshape(*x.shape[:-1], -1)


def _in_dtype(forward, dtype: torch.dtype):
    def run(x, *args, **kwargs):
        return forward(x.to(dtype), *args, **kwargs)

    return run


def _out_as(decision: ComputeDecision, forward):
    def run(x, *args, **kwargs):
        return forward(x, *args, **kwargs).to(torch.float32 if decision.stream == "fp32" else x.dtype)

    return run


def _switches(module: torch.nn.Module) -> list[Patch]:
    """What makes a core operation cast its weights to its input's dtype, and not multiply in fp8 on its own."""
    wanted = {"comfy_cast_weights": True, "_full_precision_mm": True}
    return [(module, name, value) for name, value in wanted.items() if hasattr(module, name)]


def _eager(measuring: bool):
    """Measuring reads numbers back from the device, which a compiled graph cannot."""
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if measuring and stance else contextlib.nullcontext()
