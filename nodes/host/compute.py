"""A compute plan on a ModelPatcher: module forwards and attention are exchanged for the length of each model call."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator

import comfy.ops
import comfy.quant_ops
import torch
from comfy.patcher_extension import WrappersMP

from ...precision import flags
from ...precision.compute_plan import ComputeDecision, ComputePlan
from ...precision.dtypes import dtype_named, name_of
from ...precision.eager import eager
from ...precision.operations import SafeAttention, SafeOperation, kind_of, matrix_work
from ...precision.partial_sums import FLAG
from ...precision.patching import Patch, patched
from ...precision.quantize import activation_scale
from ...precision.ranges import Ranges, Slot
from .per_model import PerModel, fresh_control
from .step_cache import StepCache
from .wrappers import order_wrappers

KEY = "halfsafe.compute"
OVERRIDE = "optimized_attention_override"
UNFUSED = ("attention_basic", "attention_split", "attention_sub_quad")
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
        order_wrappers(patcher)


def compute_of(patcher) -> "Compute | None":
    """The plan's executor on a patcher, if it has one."""
    return patcher.attachments.get(KEY)


class Compute:
    """ComfyUI's APPLY_MODEL wrapper for one plan. It keeps what it learns of each model it runs, not the model."""

    def __init__(self, plan: ComputePlan):
        self.plan = plan
        self.runs: PerModel[PlannedLayers] = PerModel(lambda model: PlannedLayers(plan, model), _state)

    def __call__(self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        run = self.runs.of(executor.class_obj)
        options, cache, made = run.options(transformer_options or {}), StepCache(transformer_options or {}), []

        def call():
            if made:
                cache.put_back()
            made.append(True)
            run.attention.begin()
            with eager(run.ranges.measuring):
                return executor(x, t, c_concat, c_crossattn, fresh_control(control), options, **kwargs)

        with patched(run.patches):
            return run.ranges.run(call)

    def modes(self, model) -> dict[str, str]:
        """Layer name -> mode, as found in the calls made so far."""
        run = self.runs.last(model)
        modes = {name: decision.mode for name, decision in self.plan.decisions.items()}
        return modes if run is None else {**modes, **run.modes()}

    def ranges(self, model) -> dict[str, float]:
        """Layer name -> the largest magnitude it was given, of the layers that are watched."""
        run = self.runs.last(model)
        return run.ranges.largest() if run else {}

    def work(self, model) -> str:
        """One line on the matrix work done with fp16 operands; empty where none was planned or measured."""
        run = self.runs.last(model)
        share = run.fp16_share() if run else None
        if share is None:
            return ""
        return f"{share:.1%} of the matrix work has fp16 operands; {run.ranges.repeats} calls were repeated"


class PlannedLayers:
    """One model under a plan: its patches and what its calls have shown.

    ``inside``: which of the other modules, by name, may meet a stream that the plan widens.
    """

    def __init__(self, plan: ComputePlan, model, inside: Callable[[str], bool] = lambda name: True):
        named = {name.replace("_orig_mod.", ""): module for name, module in model.diffusion_model.named_modules()}
        self.modules = {name: module for name, module in named.items() if name in plan.decisions}
        self.safe = plan.safe
        self.widens = plan.widens
        self.ranges = Ranges()
        self.attention = SafeAttention(self.ranges)
        self.operations: dict[str, SafeOperation] = {}
        self.in_own_way: dict[str, CastOperation] = {}
        self.patches: list[Patch] = []
        for name, module in self.modules.items():
            forward = _summed(plan.decisions[name].sums, self._forward(name, module, plan.decisions[name]))
            self.patches += [(module, "forward", forward), *_switches(module)]
        if plan.widens:
            others = (module for name, module in named.items() if hasattr(module, "comfy_cast_weights") and inside(name))
            self.patches += [(module, "comfy_cast_weights", True) for module in others]

    def _forward(self, name: str, module: torch.nn.Module, decision: ComputeDecision):
        slot = self.ranges.slot(name)
        if decision.mode == "fp8" and not has_own_forward(module):
            return _out_as(decision, Fp8Linear(module))
        if decision.mode == "fp16_wide" and only_multiplies(module):
            weights = core_weights if hasattr(module, "comfy_cast_weights") else torch_weights
            operation = self.operations[name] = SafeOperation(module, slot, self.ranges, weights)
            return operation if self.safe else _out_as(decision, operation)
        operation = CastOperation(module, _own_dtype(module, decision.mode), slot, self.ranges)
        if name_of(operation.dtype) != decision.mode:
            self.in_own_way[name] = operation
        return _out_as(decision, operation)

    def options(self, options: dict) -> dict:
        """``transformer_options`` with this plan's attention in front of whatever override is there already."""
        if not (self.safe or self.widens):
            return options
        previous = options.get(OVERRIDE)

        def override(function, *args, **kwargs):
            def attention(*inner_args, **inner):
                if previous is not None:
                    return previous(function, *inner_args, **inner)
                return function(*inner_args, **inner)

            if self.safe:
                return self.attention(attention, *args, fused=function.__name__ not in UNFUSED, **kwargs)
            return in_one_dtype(attention, *args, **kwargs)

        return {**options, OVERRIDE: override}

    def modes(self) -> dict[str, str]:
        own = {name: name_of(operation.dtype) for name, operation in self.in_own_way.items()}
        return own | {name: _mode(operation.slot) for name, operation in self.operations.items()}

    def fp16_share(self) -> float | None:
        slots = self.ranges.slots.values()
        total = sum(slot.work for slot in slots)
        fp16 = sum(operation.slot.work for operation in self.operations.values() if not operation.slot.full)
        fp16 += self.attention.slot.work - self.attention.full_work
        return fp16 / total if total else None


def in_one_dtype(attention, q, k, v, *args, **kwargs) -> torch.Tensor:
    """Attention in the widest dtype of its operands, where only some come from a widened stream."""
    widest = max((q.dtype, k.dtype, v.dtype), key=lambda dtype: dtype.itemsize)
    return attention(q.to(widest), k.to(widest), v.to(widest), *args, **kwargs)


def _state(model, modules: Iterable[torch.nn.Module]) -> tuple:
    """What a run depends on: the patched weights, active hooks, and forwards that others have put on the modules."""
    hooks = getattr(model.current_patcher, "current_hooks", None)
    return model.current_weight_patches_uuid, hooks and weakref.ref(hooks), own_forwards(modules)


def own_forwards(modules: Iterable[torch.nn.Module]) -> tuple[int, ...]:
    """The forwards that others have put on the modules, by identity."""
    return tuple(id(module.__dict__["forward"]) for module in modules if has_own_forward(module))


def _mode(slot: Slot) -> str:
    if slot.full:
        return "fp32"
    return "fp16_scaled" if slot.exponent else "fp16_wide"


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether something other than its class gave this module its forward, such as a LoRA in bypass mode."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def only_multiplies(module: torch.nn.Module) -> bool:
    """Whether the module does no more than cast its weights and multiply: ComfyUI's and torch's own classes."""
    if has_own_forward(module) or hasattr(module, "pre_quant_scale") or kind_of(module) is None:
        return False
    methods = (getattr(type(module), name, None) for name in ("forward", "forward_comfy_cast_weights", "_forward"))
    return all(method.__module__.startswith((comfy.ops.__name__, "torch.nn.")) for method in methods if method)


def _own_dtype(module: torch.nn.Module, mode: str) -> torch.dtype:
    """The dtype a module that cannot be given fp16 operands runs in; torch's own cannot cast their weights."""
    if type(module).forward.__module__.startswith("torch.nn."):
        return module.weight.dtype
    return torch.float32 if mode == "fp16_wide" else dtype_named(mode)


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


@contextlib.contextmanager
def torch_weights(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple]:
    """The same for a module of torch's own classes, which custom model code may hold."""
    bias = None if module.bias is None else module.bias.to(x.device, torch.float32)
    yield module.weight.to(x.device, dtype), bias


class CastOperation:
    """A module's own forward on an input cast to another dtype; ComfyUI's classes cast their weights to it."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, slot: Slot, ranges: Ranges):
        self.module = module
        self.forward = module.forward
        self.dtype = dtype
        self.slot = slot
        self.ranges = ranges

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        result = self.forward(x.to(self.dtype), *args, **kwargs)
        if self.ranges.measuring:
            self.slot.work += matrix_work(result, self.module, kind_of(self.module))
        return result


class Fp8Linear:
    """ComfyUI's fp8 Linear with the activation scale taken from the activation, instead of 1.0 or the file's."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: the module's input; fp32 is multiplied into bf16, as fp8 products have no fp32 result with a bias."""
        module = self.module
        dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
        if self._has_changed_weight():
            return type(module).forward(module, x.to(dtype))
        comfy.ops.run_every_op()
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        scale = activation_scale(rows, module.weight._qdata.dtype)
        quantized = comfy.quant_ops.QuantizedTensor.from_float(rows, module.layout_type, scale=scale)
        result = module.forward_comfy_cast_weights(quantized, dtype, want_requant=True)
        return result.reshape(*x.shape[:-1], -1)

    def _has_changed_weight(self) -> bool:
        """Whether a LoRA is added at each call, or has left the weight in 16 bit."""
        module = self.module
        quantized = isinstance(module.weight, comfy.quant_ops.QuantizedTensor)
        return not quantized or bool(module.weight_function or module.bias_function)


def _out_as(decision: ComputeDecision, forward):
    def run(x, *args, **kwargs):
        return forward(x, *args, **kwargs).to(torch.float32 if decision.stream == "fp32" else x.dtype)

    return run


def _summed(sums: str, forward):
    """A forward whose products sum as a rule asks; torch.compile cannot switch a layer's sums and leaves them alone."""
    if not sums:
        return forward

    def run(*args, **kwargs):
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with flags.flags_set({FLAG: sums == "fp16"}):
            return forward(*args, **kwargs)

    return run


def _switches(module: torch.nn.Module) -> list[Patch]:
    """What makes a core operation cast its weights to its input's dtype, and not multiply in fp8 on its own."""
    wanted = {"comfy_cast_weights": True, "_full_precision_mm": True}
    return [(module, name, value) for name, value in wanted.items() if hasattr(module, name)]
