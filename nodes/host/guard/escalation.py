"""Run a model with some parts wider than by themselves, and remember what earlier runs showed to be needed."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from ....precision.base.amax import amax
from ....precision.base.dtypes import name_of
from ....precision.base.flags import fp32_accumulation
from ....precision.base.modes import FP8, FP16_WIDE, FP32, modes_named
from ....precision.base.nested import cast_arguments, floats_in
from ....precision.base.patching import Patch, patched
from ....precision.guard.casting import promoting
from ....precision.guard.localize import Origin
from ....precision.guard.policy import ALL_IN_FP32, Escalation, ObservedRanges, enclosing_block
from ....precision.plan.compute import ComputeDecision, ComputePlan
from ..comfyui.execution import Make, adapts_text, conditions_through, is_compiled
from ..comfyui.gate import product_of, products_noted
from ..comfyui.layers import matrix_layers, modules_of, top_level_parts
from ..comfyui.weights import only_multiplies
from ..compute.attention import attending, forward_of, full_precision_attention, in_one_dtype, kernels_of
from ..compute.layer_modes import planned_modes_of, settings_of, stream_dtype
from ..compute.per_model import hooks_of, patches_of
from ..compute.planned_model import PlannedModel, in_fp32
from ..replay.call import Call
from ..replay.model_compiler import compiler_off
from .causes import with_patches

_learned: weakref.WeakKeyDictionary[BaseModel, dict[tuple, Escalation]] = weakref.WeakKeyDictionary()
CAST = (torch.float16, torch.bfloat16, torch.float32)


class EscalatedLayers:
    """A bare model under an escalation.

    ``modes``: layer -> mode without the escalation, for the layers that multiply.
    """

    def __init__(self, escalation: Escalation, model: BaseModel, modes: dict[str, str]):
        self.parts = top_level_parts(model.diffusion_model)
        self.everywhere = escalation.stream or escalation.whole
        blocks = () if self.everywhere else escalation.blocks
        self.blocks = {name: part for name, part in self.parts.items() if name in blocks}
        modules, own = modules_of(model), dict.fromkeys(modes, FP32.name) if escalation.whole else modes
        widened = {name: escalation.layers.get(name, mode) for name, mode in own.items() if self._widens(name)}
        decisions = {name: _decision(mode, modules[name]) for name, mode in widened.items()}
        others = (name for name in modules if name not in decisions and self._widens(name))  # as their code has it
        self.decided = {name: decision.mode for name, decision in decisions.items()} | dict.fromkeys(others, FP32.name)
        self.planned = PlannedModel(ComputePlan.of_layers(decisions), model, self._widens)
        self.whole = escalation.whole
        self._inside = 0
        self._model = model if self.everywhere else None

    def _widens(self, name: str) -> bool:
        return self.everywhere or bool(enclosing_block(name, self.blocks))

    def call(self, call: Call, zeroed: Sequence[Patch] = ()) -> torch.Tensor:
        """Make a call inside of whatever wrappers others have, with the weights ``zeroed`` in place of the model's."""
        attend = self._attend if self.everywhere or self.blocks else None
        free = compiler_off() if self.blocks else contextlib.nullcontext()
        # torch.compile makes a graph anew for each function it has not met.
        if attend and not is_compiled(call.model.current_patcher):
            call.options = with_patches(call.options, self._promoting)
        with (
            free,
            patched([*self._patches(), *zeroed]),
            attending(call.model, call, attend),
            _sums_in_fp32(self.everywhere),
        ):
            return self.planned.call(call)

    def adapted(self, make: Make) -> dict:
        """Make conditions, which calls layers of the model outside of its calls: a text adapter."""
        with patched(self._patches()), _sums_in_fp32(self.everywhere):
            return self.planned.call(make)

    def modes(self) -> dict[str, str]:
        """Map layers to the modes they run in now."""
        return self.decided | self.planned.layers.observed_modes()

    def _patches(self) -> list[Patch]:
        own = {id(module): value for module, name, value in self.planned.patches if name == "forward"}
        given = {name: own.get(id(part), forward_of(part)) for name, part in self.blocks.items()}
        blocks = [(part, "forward", self._widened_block(given[name])) for name, part in self.blocks.items()]
        entry = in_fp32(self._model) if self._model else []
        return [*entry, *self.planned.patches, *blocks]

    def _widened_block(self, forward: Callable) -> Callable:
        """Wrap a part's forward with fp32 between its layers; its result is in the dtype it was given."""

        def run(*args, **kwargs):
            floats = floats_in([value for value in [*args, *kwargs.values()] if not isinstance(value, dict)])
            given = next((value.dtype for value in floats if value.dtype != torch.float32), None)
            args = cast_arguments(args, CAST, torch.float32)
            kwargs = {key: cast_arguments(value, CAST, torch.float32) for key, value in kwargs.items()}
            self._inside += 1
            try:
                with _sums_in_fp32(True):
                    result = forward(*args, **kwargs)
            finally:
                self._inside -= 1
            return result if given is None else cast_arguments(result, CAST, given)

        return run

    def _promoting(self, function: Callable) -> Callable:
        """Wrap a node's function: its operations promote inside of widened blocks, and nowhere else."""
        promoted = promoting(function)

        def run(*args, **kwargs):
            return (promoted if self.everywhere or self._inside else function)(*args, **kwargs)

        return run

    def _attend(self, function: Callable, attention: Callable, *args, **kwargs) -> torch.Tensor:
        if not (self.everywhere or self._inside):
            return attention(*args, **kwargs)
        plain = full_precision_attention(function)
        if self.whole:
            return in_one_dtype(plain, *args, **kwargs)
        return self.planned.attention(kernels_of(plain, plain), *args, **kwargs)


class RangeObserver:
    """Measure the largest magnitudes of a call, of each layer that multiplies and of each top-level part.

    Finds the parts with an attention that fp16 could not hold, too. Enter :meth:`watching` around the call.
    """

    def __init__(self, layers: EscalatedLayers):
        self._named = [(name, module, self._layer) for name, module in layers.planned.modules.items()]
        self._named += [(name, part, self._part) for name, part in layers.parts.items()]
        self._layers: dict[str, torch.Tensor] = {}
        self._blocks: dict[str, torch.Tensor] = {}
        self._attention = layers.planned.attention
        self._seen = 0
        self._with_full_attention: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch layers and parts while the context lasts."""
        with hooked(self._named), products_noted():
            yield

    def _layer(self, name: str, module: torch.nn.Module, args: tuple, result) -> None:
        self._note(self._layers, name, product_of(module, args, result))

    def _part(self, name: str, module: torch.nn.Module, args: tuple, result) -> None:
        self._note(self._blocks, name, result)
        first, self._seen = self._seen, self._attention.index
        if any(self._attention.calls_in_fp32[first : self._seen]):
            self._with_full_attention.add(name)

    def _note(self, kept: dict[str, torch.Tensor], name: str, values) -> None:
        for value in floats_in(values):
            size = amax(value)
            kept[name] = torch.maximum(kept[name], size) if name in kept else size

    def ranges(self) -> ObservedRanges:
        """Read the magnitudes back from the device."""
        return ObservedRanges(_numbers(self._layers), _numbers(self._blocks), frozenset(self._with_full_attention))


def _numbers(kept: dict[str, torch.Tensor]) -> dict[str, float]:
    return dict(zip(kept, map(torch.Tensor.item, kept.values()), strict=True))


@contextlib.contextmanager
def hooked(watched: Iterable[tuple[str, torch.nn.Module, Callable]]) -> Iterator[None]:
    """Tell functions of (name, module, arguments, result) of each run of their modules while the context lasts, by
    hooks: the modules' forwards, which others look at, stay."""
    handles = [module.register_forward_hook(functools.partial(note, name)) for name, module, note in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sums_in_fp32(here: bool) -> contextlib.AbstractContextManager:
    return fp32_accumulation() if here else contextlib.nullcontext()


def _decision(mode: str, module: torch.nn.Module) -> ComputeDecision:
    """Decide the arithmetic of a layer with a mode under an escalation.

    A custom layer of another loader, which does more than multiply, runs in fp32 where it would have to be wide; fp8
    operands become fp16. An int8 layer that is not escalated itself stays in int8: between fp32 values its product
    cannot overflow.
    """
    if any(known.is_wide for known in modes_named([mode])):
        mode = FP16_WIDE.name if only_multiplies(module) else FP32.name
    return ComputeDecision(FP16_WIDE.name if mode == FP8.name else mode, "fp32", "escalated by the guard")


@contextlib.contextmanager
def text_adapter_in_fp32(model: BaseModel, ran: set[str]) -> Iterator[None]:
    """Run the text adapter of a model in fp32 while the context lasts, and add the layers of its calls to ``ran``.

    A text adapter is small and runs once per prompt, and an overflow in it would pass for a bad text.
    """
    if not adapts_text(model):
        yield
        return
    layers = EscalatedLayers(ALL_IN_FP32, model, {name: FP32.name for name, _ in matrix_layers(model)})
    with conditions_through(model, layers.adapted):
        yield
    ran.update(layers.planned.calibration.flops)


def learned_of(model: BaseModel) -> dict[tuple, Escalation]:
    """Return the findings of guards on a model: state of the model -> escalation. They live as long as the model, as a
    guard lasts no longer than its node's result."""
    return _learned.setdefault(model, {})


def watches_clamps(patcher: ModelPatcher) -> bool:
    """Tell whether operations of a model's code may hide an overflow in fp16, and can be watched."""
    return stream_dtype(patcher) == torch.float16 and not is_compiled(patcher)


class Guarded:
    """A model in a state of its weights. ``recall``: begin with what any guard has learned of the model."""

    def __init__(self, model: BaseModel, recall: bool):
        patcher = model.current_patcher
        self.model = weakref.ref(model)
        multiplying = {name for name, _ in matrix_layers(model)}
        self.modes = {name: mode for name, mode in planned_modes_of(patcher).items() if name in multiplying}
        self.stream = name_of(stream_dtype(patcher))
        self.watches_clamps = watches_clamps(patcher)
        self.device = patcher.load_device
        self.escalation = Escalation()
        self.layers: EscalatedLayers | None = None
        if recall:
            self.grow(learned_of(model).get(_known_as(model), self.escalation))

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The layers that are patched: none before an escalation."""
        return self.layers.planned.modules if self.layers else {}

    @property
    def forwards(self) -> list[int]:
        return self.layers.planned.forwards if self.layers else []

    def grow(self, escalation: Escalation) -> None:
        """Run with this escalation from now on."""
        if escalation != self.escalation:
            self.escalation, self.layers = escalation, EscalatedLayers(escalation, self.model(), self.modes)

    def remember(self, escalation: Escalation) -> Callable[[], None]:
        """Run with this escalation from now on, in later runs of the model too. Returns a function to take it back."""
        model, before = self.model(), (self.escalation, self.layers)
        learned, state = learned_of(model), _known_as(model)
        self.grow(escalation)
        learned[state] = escalation

        def take_back() -> None:
            self.escalation, self.layers = before
            learned[state] = self.escalation

        return take_back

    def modes_at(self, origin: Origin | None) -> tuple[str, str]:
        """Return (mode by itself, mode now) of the layer that failed, or of the values between layers."""
        layer = origin.layer if origin else ""
        own = self.modes.get(layer, self.stream)
        if layer not in self.modes:
            return own, "fp32" if self.escalation else own
        return own, self.layers.modes().get(layer, own) if self.layers else own


def _known_as(model: BaseModel) -> tuple:
    patcher = model.current_patcher
    return patches_of(patcher), hooks_of(patcher), *settings_of(patcher)
