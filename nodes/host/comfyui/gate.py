"""The gate: what ComfyUI's call of a layer passes besides its input.

After ComfyUI 0.39 a linear layer is called with more than its input (Comfy-Org/ComfyUI#16816):
``layer(x, input_act, act_weight, residual, residual_scale)`` is ``residual + residual_scale *
linear(act(x))``. The gate computes the activation and the residual as ComfyUI does, around a
:class:`layer_forward.LayerForward` that is given the plain input. The activation therefore sees
what the stream holds, fp32 in a wide stream, and the residual is added in the dtype of the stream.

    ComfyUI's call -> gate: act(x) -> LayerForward(act(x)) -> gate: residual + residual_scale *
    result

A later ComfyUI may pass arguments that are not listed here. An argument with its default changes
nothing. Any other is handed on by a forward of ours that calls the layer's own; in place of a
forward that multiplies itself the layer's own runs, with all arguments, and the layer and the
argument are noted (:func:`met_in`)."""

import functools
import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import comfy.model_management
import comfy.ops
import torch

from ....precision.base.errors import HalfsafeError
from ....precision.base.layers import kind_of
from ....precision.base.message import Message
from ....precision.base.text import listed
from ....precision.version import VERSION
from .attributes import FORWARDS, quantization_format
from .code_owner import code_owner
from .layers import modules_of

Forward = Callable[..., torch.Tensor]
ACTIVATION = "input_act"
OF_ACTIVATION = ("act_weight", "act_eps")
RESIDUAL = "residual"
OF_RESIDUAL = "residual_scale"
FOLDED = (ACTIVATION, *OF_ACTIVATION, RESIDUAL, OF_RESIDUAL)
"""The parameters of a layer's call that the gate computes by itself."""
PASSED = ("autopad", "output_size")
"""The parameters of a convolution's call, which our products take."""
INPUT = "input"
BY_PLACE = "an argument by its place"
MET = "{0} calls layers with `{1}`, which Halfsafe {2} does not know, so in these calls they run their own code: {3}."
NO_ACTIVATION = "Layer '{0}' of another pack is called with `input_act` = '{1}', for which comfy.ops has no function."
NOT_TAKEN = "Layer '{0}' is called with `{1}`, which its own code cannot run with: {2}."
UPDATE = "Update Halfsafe, or remove its nodes from this model."
OWN_CODE = "{0} runs its own code, because of `{1}`"
NORM = "norm"
UNEQUAL: dict[str, str] = {}
"""What the self-test found to run otherwise through our code than alone -> a sentence on it:
quantization formats of layers, "" for none, ``norm`` and ``attention``. The gate computes nothing
for such layers, and no code of ours runs in place of theirs."""
logger = logging.getLogger("halfsafe")
_met: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


class _LayerCall(NamedTuple):
    """What a layer class takes in a call: the name of its input, and the defaults of its other
    parameters by name."""

    input: str
    defaults: dict[str, object]


def _is_core(cls: type[torch.nn.Module]) -> bool:
    return cls.forward.__module__ == comfy.ops.manual_cast.Linear.forward.__module__


def folded_parameters(cls: type) -> tuple[str, ...]:
    """Return the parameters of a class's forward after its input that are folded, in their
    order."""
    return tuple(name for name in _call_of(cls).defaults if name in FOLDED)


def _call_of(cls: type) -> _LayerCall:
    """Return the parameters of a call of a layer class: those of ``forward``, or of the method that
    a ``forward`` of ``*args, **kwargs`` hands them on to."""
    return _call(tuple(getattr(cls, name, None) for name in FORWARDS[:2]))


@functools.cache
def _call(methods: tuple[Callable | None, ...]) -> _LayerCall:
    for method in filter(None, methods):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if named:
            return _LayerCall(named[0].name, {each.name: each.default for each in named[1:]})
    return _LayerCall(INPUT, {})


def ran_own(module: torch.nn.Module) -> bool:
    """True if some call of a layer ran the layer's own code because of an argument that is not
    known."""
    return module in _met


def is_unequal(module: torch.nn.Module) -> bool:
    """True if the self-test found that modules of this kind run otherwise through our code than
    alone."""
    return bool(UNEQUAL) and (quantization_format(module) if kind_of(module) else NORM) in UNEQUAL


class Gate:
    """Read the arguments of a layer's call, and compute what ComfyUI folds into the layer.

    ``call``: what ComfyUI's class takes; None for a layer of another pack, whose own arguments stay
    where they are."""

    __slots__ = ("call", "folds", "module")

    def __init__(self, module: torch.nn.Module, call: _LayerCall | None):
        self.module = module
        self.call = call
        takes = () if call else _call_of(type(module)).defaults
        self.folds = () if call and is_unequal(module) else tuple(name for name in FOLDED if name not in takes)

    @classmethod
    def of(cls, module: torch.nn.Module, replaces: bool) -> "Gate | None":
        """Return the gate of a layer; None if this ComfyUI passes it nothing besides its input.

        ``replaces``: what runs behind the gate does not take arguments that are not known.
        """
        kind = kind_of(module)
        if kind is None:
            return None
        call, is_core = _call_of(type(module)), _is_core(type(module))
        folds = kind == "linear" and bool(folded_parameters(comfy.ops.manual_cast.Linear))
        meets = replaces and not call.defaults.keys() <= {*PASSED}
        return cls(module, call if is_core else None) if folds or meets or (is_core and call.input != INPUT) else None

    def enter(self, chosen: Callable[..., Forward], args: tuple, kwargs: dict) -> torch.Tensor:
        """Run a layer's call. ``chosen``: returns what to run, given the names of the arguments
        that are not known, if there are any."""
        x, places, given = self._read(args, kwargs)
        folded = {name: given.pop(name) for name in self.folds if name in given}
        unknown = {*given} - {*PASSED} | {BY_PLACE for _ in places}
        if not _can_activate(folded):
            if self.call is None:
                raise HalfsafeError(Message(NO_ACTIVATION, _name_of_layer(self.module), folded[ACTIVATION]), UPDATE)
            unknown.add(ACTIVATION)
        run = chosen(unknown) if unknown else chosen()
        if unknown and self.call:
            kwargs.pop(self.call.input, None)
            try:
                return run(x, *args[1:], **kwargs)
            except TypeError as error:
                problem = Message(NOT_TAKEN, _name_of_layer(self.module), listed(sorted(unknown)), error)
                raise HalfsafeError(problem, UPDATE) from error
        return with_residual(run(activated(x, folded), *places, **given), folded)

    def _read(self, args: tuple, kwargs: dict) -> tuple[torch.Tensor, tuple, dict]:
        """Return the input, the arguments that stay in their places, and those by name that change
        something."""
        if self.call is None:
            return args[0], args[1:], dict(kwargs)
        defaults = self.call.defaults
        named = dict(zip((self.call.input, *defaults), args, strict=False)) | kwargs
        x = named.pop(self.call.input)
        given = {
            name: value for name, value in named.items() if name in self.folds or not is_default(value, name, defaults)
        }
        return x, args[1 + len(defaults) :], given

    def note_met(self, arguments: Collection[str]) -> None:
        """Note that a call of the layer ran the layer's own code because of arguments; tell each
        argument of a class once."""
        if torch.compiler.is_compiling():
            return
        met = _met.setdefault(self.module, set())
        if met.issuperset(arguments):
            return
        told = {argument for module, of in _met.items() if type(module) is type(self.module) for argument in of}
        met.update(arguments)
        for argument in sorted(met - told):
            problem = Message(MET, _caller(self.module), argument, VERSION, _name_of_layer(self.module))
            logger.warning("Halfsafe: %s", problem)


def is_default(value: object, name: str, defaults: Mapping[str, object]) -> bool:
    """True if an argument is the default of its parameter; False for a tensor."""
    return name in defaults and not isinstance(value, torch.Tensor) and value == defaults[name]


def met_in(model) -> dict[str, str]:
    """Return which layers of a model ran their own code because of an argument: a few words for
    each argument, with the sentence."""
    if not _met:  # a walk over the modules takes ten functions of Python for each
        return {}
    found = defaultdict(list)
    for name, module in modules_of(model).items():
        for argument in sorted(_met.get(module, ())):
            found[_caller(module), argument].append(name)
    return {
        Message(OWN_CODE, names[0], argument): Message(MET, caller, argument, VERSION, listed(names))
        for (caller, argument), names in found.items()
    }


def _caller(module: torch.nn.Module) -> str:
    """Name whose parameters a layer's call has: ComfyUI's, or those of another pack that replaced
    its code."""
    owner = code_owner(type(module).forward)
    return Message("The pack {0}", owner) if owner else "This ComfyUI"


def _name_of_layer(module: torch.nn.Module) -> str:
    """Return the name of a layer in the models that are loaded; its class's in none."""
    models = (loaded.model.model for loaded in comfy.model_management.current_loaded_models if loaded.model is not None)
    names = (name for model in models for name, each in model.named_modules() if each is module)
    return next(names, type(module).__name__)


def _can_activate(folded: dict) -> bool:
    """True if this ComfyUI gives a function for the activation of a layer's call."""
    name = folded.get(ACTIVATION)
    return name is None or hasattr(comfy.ops, "_eager_input_act") or name in comfy.ops.INPUT_ACT_EAGER


def activated(x: torch.Tensor, folded: dict) -> torch.Tensor:
    """Return the input that a layer multiplies: ComfyUI's own activation of ``x``, in the dtype of
    ``x``."""
    name = folded.get(ACTIVATION)
    if name is None:
        return x
    of_core = getattr(comfy.ops, "_eager_input_act", None)
    if of_core is not None:
        return of_core(x, name, **{each: folded[each] for each in OF_ACTIVATION if each in folded})
    return comfy.ops.INPUT_ACT_EAGER[name](x)


def with_residual(result: torch.Tensor, folded: dict) -> torch.Tensor:
    """Return ``residual + residual_scale * result``, in the wider of their dtypes; ``result``
    without a residual."""
    residual, scale = folded.get(RESIDUAL), folded.get(OF_RESIDUAL)
    if residual is None:
        return result
    if scale is None:
        return residual + result
    if isinstance(scale, torch.Tensor):
        return torch.addcmul(residual, result, scale)
    return torch.add(residual, result, alpha=scale)
