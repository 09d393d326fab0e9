"""Exchange the forwards of a loaded model's modules, and provide their weights in a dtype."""

import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TypeAlias

import comfy.ops
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from torch.nn import Parameter

from ....precision.arithmetic.linear import Provided, WeightProvider
from ....precision.base.layers import kind_of
from ....precision.base.patching import Patch, SharedScope, patched
from ....precision.formats.format import Format, Unpacker
from .attributes import (
    BIAS_FUNCTIONS,
    DYNAMIC,
    FORWARDS,
    FULL_PRECISION,
    INPUT_SCALE,
    PRODUCT,
    WEIGHT_FUNCTIONS,
    casts_weights,
    is_patched,
    lie_ready,
    resident_weights,
)
from .code_owner import code_owner
from .gate import is_unequal
from .kernels import DATA, LAYOUT, PARAMS, bound_format, group_of, unpacking
from .layer_forward import LayerForward
from .layers import is_quantized

CAST_PARAMETERS = inspect.signature(comfy.ops.cast_bias_weight).parameters
PATCHES_IN_FP32 = {"compute_dtype": torch.float32} if "compute_dtype" in CAST_PARAMETERS else {}
"""LoRAs of dynamic VRAM are added in fp32, as ComfyUI adds them in an fp32 model; its own default
is the weight's dtype."""
FUSES_INT8 = "_int8_convrot_linear"
HALF = (torch.float16, torch.bfloat16)
NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)
Dtype: TypeAlias = torch.dtype | None


def has_own_forward(module: torch.nn.Module) -> bool:
    """Tell whether something other than its class gave this module its forward, such as a LoRA in
    bypass mode."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) not in (type(module).forward, Bound.__call__)


def exchanged(forward: LayerForward, fp16_sums: bool = True) -> list[Patch]:
    """Put a forward on its layer, and route all of the layer's matmuls through it.

    ``_full_precision_mm`` also turns off the two paths of ``comfy/ops.py`` that bypass ``forward``:
    its own fp8 matmul and, since ComfyUI 0.38, an fp16 matmul taken while fp16 accumulation is on.
    ``fp16_sums``: it may be on."""
    module, patches = forward.module, forward.put_on()
    if fp16_sums or is_quantized(module):
        patches.append((module, FULL_PRECISION, True))
    return [*patches, (module, PRODUCT, _DequantizedProduct(module).__call__)] if is_quantized(module) else patches


def _calls_layers() -> contextlib.AbstractContextManager[None]:
    """Have the functions of ComfyUI that multiply by an int8 weight past its layer's forward call
    the layer instead."""
    past_forward: list[Patch] = []
    if hasattr(comfy.ops, "linear_input_act"):
        past_forward.append((comfy.ops, "linear_input_act", _input_act_calling(comfy.ops.linear_input_act)))
    for place in _places_of(FUSES_INT8):
        past_forward.append((place, FUSES_INT8, _fuses_no_exchanged(getattr(place, FUSES_INT8))))
    return patched(past_forward)


def _places_of(name: str) -> list[ModuleType]:
    """List the modules of ComfyUI in use that have a function of this name, their own or
    another's."""
    return [module for module in _core_modules(len(sys.modules)) if hasattr(module, name)]


@functools.lru_cache(maxsize=1)
def _core_modules(count: int) -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("comfy.")]


class _OnlyCalled:
    """A layer without a weight to read: ``linear_input_act`` of ``comfy/ops.py``, in all versions,
    can only call it."""

    weight = None
    _full_precision_mm = True

    def __init__(self, layer: torch.nn.Module):
        self._layer = layer

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return self._layer(x, *args, **kwargs)


def _input_act_calling(original: Callable) -> Callable:
    def run(linear, x, *args, **kwargs):
        if has_own_forward(linear) or (is_quantized(linear) and linear.weight.dtype != x.dtype):
            linear = _OnlyCalled(linear)
        return original(linear, x, *args, **kwargs)

    return run


def _fuses_no_exchanged(original: Callable) -> Callable:
    """Wrap the test by which Lumina and Z-Image multiply by an int8 weight in a fused kernel after
    ComfyUI 0.33 (Comfy-Org/ComfyUI#15928): it fails for a layer with a forward of ours, such as a
    LoRA's."""

    def run(linear, *args, **kwargs):
        return not has_own_forward(linear) and original(linear, *args, **kwargs)

    return run


_layers_called = SharedScope(_calls_layers)


def uncast_norm(module: torch.nn.Module) -> list[Patch]:
    """Run a norm of ComfyUI's as torch does, with its parameters cast to its input's dtype, while
    they lie ready."""
    kind = next((each for each in NORMS if isinstance(module, each)), None)
    if kind is None or not casts_weights(module) or not _only_computes(module) or module.weight is None:
        return []
    cls, plain = type(module), kind.forward
    own, cast = cls.forward, getattr(cls, FORWARDS[1])
    if not plain.__module__.startswith("torch.nn."):
        return []

    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        # Other packs put code of theirs in place of a norm's after this was made: AnimateDiff-Evolved replaces
        # torch's GroupNorm, and ComfyUI's, in each call (animatediff/sampling.py).
        # Written so that a graph of torch.compile does not break there.
        is_own = kind.forward is plain and cls.forward is own and getattr(cls, FORWARDS[1]) is cast
        is_own = is_own and FORWARDS[1] not in module.__dict__
        if args or kwargs or not is_own or not lie_ready(module, weight, bias, x):
            return cls.forward(module, x, *args, **kwargs)
        comfy.ops.run_every_op()
        if weight.dtype == x.dtype:
            return kind.forward(module, x)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if kind is torch.nn.RMSNorm:
            return F.rms_norm(x, module.normalized_shape, weight, module.eps)
        if kind is torch.nn.GroupNorm:
            return F.group_norm(x, module.num_groups, weight, bias, module.eps)
        return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)

    return LayerForward(module, forward, gated=False).put_on()


def calling_layers(modules: Iterable[torch.nn.Module]) -> contextlib.AbstractContextManager:
    """Have ComfyUI call a layer whose forward we exchanged where it multiplies by an int8 weight
    itself.

    ``linear_input_act`` of ``comfy/ops.py`` does (MiniMax; from 0.33 to 0.39 the MLPs of Wan and
    LTX-Video too), and dequantizes a weight whose dtype is not the input's, as in an fp32 stream:
    there the layer is called, which keeps int8. Lumina and Z-Image do after 0.33. Holds on every
    thread; changes nothing if no module is quantized."""
    return _layers_called if any(map(is_quantized, modules)) else contextlib.nullcontext()


def ask_for_plain_products(patcher: ModelPatcher) -> None:
    """Make the quantized layers of a patcher's model dequantize their weights for as long as it is
    loaded."""
    for name, module in patcher.model.named_modules():
        if is_quantized(module) and hasattr(module, PRODUCT):
            patcher.add_object_patch(f"{name}.{FULL_PRECISION}", True)
            patcher.add_object_patch(f"{name}.{PRODUCT}", _DequantizedProduct(module).__call__)
            # ComfyUI asks a weight for its functions also where it multiplies by the weight past the layer's forward.
            patcher.add_weight_wrapper(f"{name}.weight", dequantized)


class _DequantizedProduct:
    """The product inside of ComfyUI's quantized Linear, of a dequantized weight. An int8 weight
    left quantized multiplies in int8 whatever ``_full_precision_mm`` says, up to ComfyUI 0.33
    (``forward_comfy_cast_weights`` in ``comfy/ops.py``)."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.product = getattr(type(module), PRODUCT)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return self.product(self.module, x, dequantized(weight), *args, **kwargs)


def dequantized(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a weight as plain numbers in a dtype; None for its own."""
    if not isinstance(weight, QuantizedTensor):
        return weight if dtype is None else weight.to(dtype)
    dtype = dtype or weight.params.orig_dtype
    if not torch.compiler.is_compiling() and (format := bound_format(weight)):
        return format.numbers(unpacking(format, weight, dtype), getattr(weight, DATA), weight.params.scale)
    return weight.to(dtype).dequantize()


def is_quantized_bank(module: torch.nn.Module) -> bool:
    """Tell whether a module holds quantized weights of experts, ``(experts, outputs, inputs)``."""
    return is_quantized(module) and hasattr(module, "expert_weight")


def numbers_of(module: torch.nn.Module, held: torch.Tensor | None = None) -> torch.Tensor:
    """Return a module's weight as plain numbers: with the scale for inputs that it may have, and
    those of experts each by its own scale. ``held``: another weight of the module; None for its
    present one."""
    if is_quantized_bank(module):
        return torch.stack([dequantized(module.expert_weight(i)) for i in range(module.num_experts)])
    weight = dequantized(module.weight.data if held is None else held)
    return weight * getattr(module, INPUT_SCALE).to(weight) if hasattr(module, INPUT_SCALE) else weight


def only_multiplies(module: torch.nn.Module) -> bool:
    """Tell whether the module does no more than cast its weights and multiply: ComfyUI's and
    torch's own classes."""
    return not hasattr(module, INPUT_SCALE) and kind_of(module) is not None and _only_computes(module)


def _only_computes(module: torch.nn.Module) -> bool:
    """Tell whether the module runs as ComfyUI's and torch's own classes do."""
    if has_own_forward(module) or FORWARDS[1] in vars(module) or is_unequal(module):
        return False
    methods = [*filter(None, (getattr(type(module), name, None) for name in FORWARDS))]
    own = "torch.nn.", comfy.ops.__name__, comfy.ops.manual_cast.Linear.forward.__module__
    # A decorated function of a pack has the module's name of what it wraps.
    return all(method.__module__.startswith(own) for method in methods) and not any(map(code_owner, methods))


def multiplies_in_fp8(module: torch.nn.Module) -> bool:
    """True if ComfyUI's forward of a layer multiplies by its plain fp8 weight in fp8, with scales of
    1: UNETLoader's ``fp8_e4m3fn_fast``, and ``--fast fp8_matrix_mult``."""
    return isinstance(module, comfy.ops.fp8_ops.Linear) and module.weight.dtype == torch.float8_e4m3fn


def weights_of(module: torch.nn.Module) -> WeightProvider:
    """Return the provider of such a module's weight in a dtype and its bias in fp32."""
    if is_quantized(module):
        return Bound(module).numbers
    return core_weights if casts_weights(module) else _torch_weights


def _torch_weights(module: torch.nn.Module, x: torch.Tensor, dtype: Dtype, bias_dtype: Dtype = torch.float32) -> tuple:
    """Provide the weight and bias of a layer of torch's own classes on its input's device, each
    rounded once. ``bias_dtype``: None for fp32."""
    bias = module.bias
    weight = module.weight.to(x.device, dtype or module.weight.dtype)
    return weight, None if bias is None else bias.to(x.device, bias_dtype or torch.float32)


def core_weights(module: torch.nn.Module, x: torch.Tensor, dtype: Dtype, bias_dtype: Dtype = torch.float32) -> Provided:
    """Provide a module's weight in ``dtype`` and its bias in ``bias_dtype``, as ``WeightProvider``
    says: torch's own cast of the parameters where they lie ready, else ``_CastWeights``.

    What needs no cast, or is lent, does not ask for an interrupt: the norms between such layers do.
    """
    if DYNAMIC in module.__dict__:
        return _CastWeights(module, x, dtype or _dtype_to_measure(module), bias_dtype or _dtype_of_bias(module))
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    plain = type(weight) is Parameter
    needs_no_cast = plain and weight.dtype is dtype and (bias is None or bias.dtype is (bias_dtype or dtype))
    if needs_no_cast and lie_ready(module, weight, bias, x):
        return weight, bias
    if dtype is None:
        dtype = _dtype_to_measure(module)
    quantized = isinstance(weight, QuantizedTensor)
    if not (quantized or plain) or not lie_ready(module, weight, bias, x):
        return _CastWeights(module, x, dtype, bias_dtype or _dtype_of_bias(module))
    comfy.ops.run_every_op()
    if bias is not None and bias.dtype != bias_dtype:
        bias = bias.to(bias_dtype or (bias.dtype if bias.dtype in HALF else torch.float32))
    if quantized or weight.dtype != dtype:
        weight = dequantized(weight, dtype)
    return weight, bias


def _dtype_to_measure(module: torch.nn.Module) -> torch.dtype:
    if getattr(module, WEIGHT_FUNCTIONS) and not is_quantized(module):
        return torch.float32
    held = module.weight.dtype
    return held if held in (*HALF, torch.float32) and not is_quantized(module) else torch.float16


def _dtype_of_bias(module: torch.nn.Module) -> torch.dtype:
    bias = module._parameters.get("bias")
    held = torch.float32 if bias is None or is_patched(module, "bias") else bias.dtype
    return held if held in HALF else torch.float32


class _CastWeights:
    """Lend a module's weight in ``dtype`` and its bias in ``bias_dtype``: from its pages in VRAM,
    else through ComfyUI's cast: offload, LoRA, quantization. ``want_requant``: a quantized weight
    stays quantized, its LoRA merged, unless ``unpack`` gives its numbers in a dtype.

    A LoRA added at each call is added in fp32: ``cast_bias_weight`` adds it in the dtype it is
    asked for. A class, as a generator runs twice as many functions of Python, which counts in each
    layer of each call under dynamic VRAM."""

    __slots__ = ("bias_dtype", "device", "dtype", "lent", "module", "unpack", "want_requant")

    def __init__(
        self,
        module: torch.nn.Module,
        x: torch.Tensor,
        dtype: torch.dtype,
        bias_dtype: torch.dtype,
        want_requant: bool = False,
        unpack: Callable | None = None,
    ):
        self.module, self.device = module, x.device
        self.dtype, self.bias_dtype, self.want_requant, self.unpack = dtype, bias_dtype, want_requant, unpack

    def __enter__(self) -> tuple:
        module, dtype = self.module, self.dtype
        lent = resident_weights(module, self.device)
        if lent is None:
            asked = torch.float32 if getattr(module, WEIGHT_FUNCTIONS) and not self.want_requant else dtype
            lent = comfy.ops.cast_bias_weight(
                module, dtype=asked, device=self.device, bias_dtype=self.bias_dtype, offloadable=True,
                want_requant=self.want_requant, **PATCHES_IN_FP32,
            )  # fmt: skip
        self.lent = lent
        weight, bias, _ = lent
        try:
            if self.unpack is not None:
                weight = self.unpack(weight, dtype)
            elif not self.want_requant and (weight.dtype is not dtype or isinstance(weight, QuantizedTensor)):
                weight = dequantized(weight, dtype)
            return weight, bias if bias is None else bias.to(self.bias_dtype)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_) -> None:
        comfy.ops.uncast_bias_weight(self.module, *self.lent)


class Bound:
    """Forward of a quantized Linear whose kernels are looked up once for the form of its weight,
    not in each call.

    The form is everything of a weight but its numbers: format, dtypes, rotation. It is compared in
    each call, and numbers are read in each call: data, scale and bias may change in place, be
    exchanged in the weight, or come with another weight. In inference mode tensors count no
    changes, so no copy of a number could be known to be right. No reference to a tensor is kept:
    ComfyUI moves weights, and ``torch.utils.swap_tensors`` refuses those with one.

    The product is that of ComfyUI's forward with an unpacked weight.

    ``own``: the layer's forward, which runs in place of the product if ComfyUI changes the weight
    in this call, if the weight has another layout, with further arguments, in a graph of
    torch.compile, and if a gradient is needed."""

    takes_patched = False
    """A weight that is patched under dynamic VRAM is lent patched and quantized."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.own = module, module.forward
        self.form: tuple = ()
        self.read_settings: Callable[[object], object] = type
        self.settings: object = None
        self.format: Format | None = None
        self.kernels: dict[object, Unpacker] = {}
        self.products: dict[object, Callable[..., torch.Tensor]] = {}
        self.ran: bool | torch.dtype = False  # in the calls so far; the dtype if the last one unpacked the weight

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling() or args or kwargs or input.requires_grad:
            return self.otherwise(input, *args, **kwargs)
        self.ran = True
        ready, parameters = self.is_ready(input), self.module._parameters
        if ready:
            weight, bias = parameters["weight"], parameters["bias"]
            product = self.products.get((input.dtype, input.get_device(), input.dim())) or self.product_for(
                input, weight
            )
            return product(input, getattr(weight, DATA), getattr(weight, PARAMS).scale, bias)
        if ready is None:
            return self.otherwise(input)
        with _CastWeights(self.module, input, self.orig_dtype, input.dtype, want_requant=True) as (weight, bias):
            if not isinstance(weight, QuantizedTensor):  # on a CPU, for which dynamic VRAM has no pages
                return F.linear(input, weight.to(input.dtype), bias)
            product = self.products.get((input.dtype, input.get_device(), input.dim())) or self.product_for(
                input, weight
            )
            return product(input, getattr(weight, DATA), getattr(weight, PARAMS).scale, bias)

    def otherwise(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Run the layer without a resolved weight."""
        return self.own(input, *args, **kwargs)

    def is_ready(self, x: torch.Tensor) -> bool | None:
        """True if the weight lies on the device of ``x``, False if ComfyUI lends it there, None if
        it cannot be resolved in this call."""
        module = self.module
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        params = getattr(weight, PARAMS, None)
        if params is None:
            return None
        data, scale = getattr(weight, DATA), params.scale
        # Written out: a function of Python would be one more in each layer.
        form = type(params), getattr(weight, LAYOUT), data.dtype, scale.dtype, scale.numel()
        if form != self.form or self.read_settings(params) != self.settings:
            self.look_up(weight, form)
        if not self.format or getattr(module, WEIGHT_FUNCTIONS) or getattr(module, BIAS_FUNCTIONS):
            return None
        device = x.get_device()
        if DYNAMIC in module.__dict__:
            patched = is_patched(module, "weight") or is_patched(module, "bias")
            return None if patched and not self.takes_patched else False
        return data.get_device() == device and (bias is None or bias.get_device() == device)

    def look_up(self, weight: QuantizedTensor, form: tuple) -> None:
        """Look up what a weight's form decides, and forget the kernels of another form."""
        others = (name for name, value in vars(weight.params).items() if not isinstance(value, torch.Tensor))
        self.form, self.read_settings = form, operator.attrgetter(*others)
        self.settings, self.format = self.read_settings(weight.params), bound_format(weight)
        self.kernels, self.products = {}, {}
        if self.format:
            self.group, self.orig_dtype = group_of(weight), weight.dtype

    def numbers(
        self, module: torch.nn.Module, x: torch.Tensor, dtype: Dtype, bias_dtype: Dtype = torch.float32
    ) -> Provided:
        """Provide the weight and bias as :func:`core_weights` does."""
        if dtype is None or torch.compiler.is_dynamo_compiling() or (ready := self.is_ready(x)) is None:
            return core_weights(module, x, dtype, bias_dtype)
        bias_dtype = bias_dtype or _dtype_of_bias(module)
        if not ready:
            return _CastWeights(module, x, dtype, bias_dtype, want_requant=True, unpack=self._unpacked)
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        kernel, more = self.kernels.get((dtype, x.get_device())) or self._kernel(weight, dtype)
        bias = None if bias is None else bias.to(bias_dtype)
        return kernel(getattr(weight, DATA), getattr(weight, PARAMS).scale, *more), bias

    def product_for(self, x: torch.Tensor, weight: QuantizedTensor) -> Callable[..., torch.Tensor]:
        """Look up the product for inputs like ``x`` and keep it: of ``x``, data, scale and bias."""
        assert self.format, "a weight is ready in a format alone"
        product = self.products[x.dtype, x.get_device(), x.dim()] = self._product(self.format, x, weight)
        return product

    def _unpacked(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(weight, QuantizedTensor):  # on a CPU, for which dynamic VRAM has no pages
            return weight.to(dtype)
        data = getattr(weight, DATA)
        kernel, more = self.kernels.get((dtype, data.get_device())) or self._kernel(weight, dtype)
        return kernel(data, getattr(weight, PARAMS).scale, *more)

    def _product(self, format: Format, x: torch.Tensor, weight: QuantizedTensor) -> Callable[..., torch.Tensor]:
        return functools.partial(format.apply_unpacked, unpacking(format, weight, x.dtype))

    def _kernel(self, weight: QuantizedTensor, dtype: torch.dtype) -> Unpacker:
        assert self.format, "a weight is ready in a format alone"
        found = self.kernels[dtype, getattr(weight, DATA).get_device()] = unpacking(self.format, weight, dtype)
        return found
