"""Override a model's attention through ComfyUI's ``optimized_attention_override``; an earlier
override is called by ours."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator

import comfy.ldm.modules.attention
import torch
from comfy.cli_args import args as command_line

from ....precision.arithmetic.attention import Kernels
from ....precision.base.layers import kind_of
from ....precision.base.message import Message, joined
from ....precision.base.patching import Patch, watched_forward
from ..comfyui.attributes import OVERRIDE, has_kitchen_attention
from ..comfyui.gate import is_default
from ..comfyui.layers import top_level_parts
from ..replay.call import Call

_parts: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()
UNFUSED = ("attention_basic", "attention_split", "attention_sub_quad")
ATTENTIONS = {
    "attention_pytorch": "PyTorch's",
    "attention_sage": "SageAttention's",
    "attention3_sage": "SageAttention 3's",
    "attention_comfy_kitchen_int8": "comfy-kitchen's int8",
    "attention_flash": "FlashAttention's",
    "attention_xformers": "xformers'",
    "attention_sub_quad": "sub-quadratic",
    "attention_split": "split",
    "attention_basic": "basic",
}
"""ComfyUI's function -> what people call it."""
KITCHEN = "attention_comfy_kitchen_int8"
QUANTIZED = (KITCHEN, "attention_sage", "attention3_sage")
SWITCH_OF = {KITCHEN: "--use-ck-attention", "attention_sage": "--use-sage-attention"}
REMOVE_NODE = "Remove the node that chose this attention, or choose another there."
OTHER_SWITCH = "Start ComfyUI with --use-pytorch-cross-attention in place of {0}."
BACKEND_NODE = "ComfyUI's node Model Attention Backend, set to pytorch attention, chooses another for one model."
EXACT = ("attention_pytorch", *UNFUSED)
"""ComfyUI's attentions that compute in fp32 for fp32 inputs: they neither quantize nor accumulate
in fp16."""
BOUNDED = frozenset((
    "q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape", "transformer_options",
    "scale", "enable_gqa", "low_precision_attention", "preferred_attention", "low_precision", "_inside_attn_wrapper",
))  # fmt: skip
"""The arguments of an attention of ComfyUI that the bounds of its numbers take into account."""


def overridden(options: dict, run: Callable) -> dict:
    """Return ``transformer_options`` whose attentions are ``run(function, attention, *args,
    **kwargs)``.

    ``function``: ComfyUI's attention function. ``attention``: the function that would run without
    the override: ``function`` itself, or an earlier override."""
    previous = options.get(OVERRIDE)

    def override(function, *args, **kwargs):
        attention = function if previous is None else functools.partial(previous, function)
        return run(function, attention, *args, **kwargs)

    return {**options, OVERRIDE: override}


@contextlib.contextmanager
def attending(call: Call, run: Callable | None, inputs: Callable[[dict], None] | None = None) -> Iterator[None]:
    """Context in which ``run`` is the attention of a model's call, as in :func:`overridden`; None
    changes nothing. ``inputs``: called with the arguments of the model's forward, by index or name.

    ComfyUI's TorchCompileModel drops every guard on ``transformer_options``
    (comfy_extras/nodes_torch_compile.py): a graph compiled without an override would run for a call
    with one, and a graph compiled with an override would miss later changes. So the parts that may
    be compiled get an entry during the call, which contains the override itself: that of the
    innermost context, which calls the others."""
    if run is None:
        yield
        return
    options, entries = call.options, call.entries
    call.options = overridden(options, run)
    call.entries = functools.partial(_entries, call.model.diffusion_model, call.options[OVERRIDE], inputs)
    try:
        yield
    finally:
        call.options, call.entries = options, entries


def _entries(model: torch.nn.Module, override: Callable, inputs: Callable | None) -> Iterator[Patch]:
    whole = getattr(model, "_orig_mod", model)
    for part in _compilable_parts(model):
        yield from watched_forward(part, functools.partial(_entered, override, inputs if part is whole else None))


def _entered(override: Callable, inputs: Callable | None, forward: Callable, *args, transformer_options=None, **kwargs):
    if inputs is not None:
        inputs({**dict(enumerate(args)), **kwargs})
    if transformer_options is not None:
        kwargs["transformer_options"] = {**transformer_options, OVERRIDE: override}
    return forward(*args, **kwargs)


def _compilable_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    if model not in _parts:
        parts = [getattr(part, "_orig_mod", part) for part in (model, *top_level_parts(model).values())]
        holders = (part for part in parts if next(part.children(), None) is not None)  # a compiled child refuses bool
        _parts[model] = [weakref.ref(part) for part in holders if kind_of(part) is None]
    return [part for reference in _parts[model] if (part := reference())]


def function_name(attention: Callable, overrides: bool = False) -> str:
    """Return the name of an attention. Of one that ``overrides`` ComfyUI's it is the name of the
    attention of ComfyUI's that it runs, which it holds as a variable (``ModelAttentionBackend``,
    0.33, and KJNodes' SageAttention); its own without one."""
    of_core = overrides and inspect.isfunction(attention)
    held = map(_own_name, inspect.getclosurevars(attention).nonlocals.values() if of_core else ())
    return next((name for name in held if name in ATTENTIONS), _own_name(attention))


def _own_name(attention: object) -> str:
    return getattr(attention, "__name__", type(attention).__name__)


def how_to_choose_another(kernel: str, options: dict) -> str:
    """Return how to choose another attention than ``kernel``, by its name in ``ATTENTIONS``.
    ``options``: the ``transformer_options`` of the model: with an override if a node chose it."""
    switch = next((switch for name, switch in SWITCH_OF.items() if ATTENTIONS[name] == kernel), "")
    own = REMOVE_NODE if OVERRIDE in options else switch and Message(OTHER_SWITCH, switch)
    return joined([own, BACKEND_NODE if has_kitchen_attention(command_line) else ""])


def fuses_by_default() -> bool:
    """True if the attention that ComfyUI was started with keeps its scores in fp32 registers."""
    attention = comfy.ldm.modules.attention
    functions = attention.optimized_attention, attention.optimized_attention_masked
    return all(function.__name__ not in UNFUSED for function in functions)


def scores_in_fp32(function: Callable, attention: Callable, *args, **kwargs) -> torch.Tensor:
    """Run attention with the scores of an unfused kernel in fp32: a score of -inf in fp16 would
    drop its token silently."""
    kwargs |= {"attn_precision": torch.float32} if function.__name__ in UNFUSED else {}
    return attention(*args, **kwargs)


def kernels_of(function: Callable, attention: Callable, args: tuple, kwargs: dict) -> Kernels:
    """Describe a ComfyUI attention ``function`` that would run as ``attention``. ``args``,
    ``kwargs``: its arguments after ``heads``."""
    name, fp32 = function.__name__, full_precision_attention(function)
    foreign = attention is not function or name not in EXACT
    # A compiled graph runs as the calibrating call did, which no graph is made of.
    unbounded = not torch.compiler.is_compiling() and not _are_known(function, args, kwargs)
    return Kernels(attention, fp32, name not in UNFUSED, foreign, unbounded)


def _are_known(function: Callable, args: tuple, kwargs: dict) -> bool:
    """True if the bounds of an attention take all of its arguments into account that are not their
    defaults."""
    if not args and kwargs.keys() <= BOUNDED:
        return True
    defaults = _after_heads(function)
    named = {**dict(zip(defaults, args, strict=False)), **kwargs}
    return all(name in BOUNDED or is_default(value, name, defaults) for name, value in named.items())


@functools.cache
def _after_heads(function: Callable) -> dict[str, object]:
    """Map the parameters of an attention after ``heads`` to their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in [*parameters][4:] if each.kind is not each.VAR_KEYWORD}


def full_precision_attention(function: Callable) -> Callable:
    """Return an attention that computes in fp32: ``function`` itself, or ComfyUI's default for a
    kernel of 16 bits or less."""
    return function if function.__name__ in EXACT else comfy.ldm.modules.attention.attention_pytorch


def in_one_dtype(attention: Callable, q, k, v, *args, **kwargs) -> torch.Tensor:
    """Run attention in the widest dtype among q, k and v, if only some of them come from fp32
    activations."""
    widest = max((q.dtype, k.dtype, v.dtype), key=lambda dtype: dtype.itemsize)
    return attention(q.to(widest), k.to(widest), v.to(widest), *args, **kwargs)
