"""Leave LoRAs out of 8-bit weights, and add them to the results of the layers: ComfyUI's
ModelPatcher with that one difference.

ComfyUI adds a patch to the dequantized weight and rounds the sum to 8 bits again
(``patch_weight_to_device`` in ``comfy/model_patcher.py``). Here a LoRA is left out where weights
are loaded, and its product is added to the layer's result (``low_rank.py``). It stays in
``patches``, where clones, savers and merges read it.
"""

import contextlib
import functools
import logging
import uuid
from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeGuard, cast

import comfy.lora
import comfy.model_base
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection
from comfy.quant_ops import QuantizedTensor

from ....precision.arithmetic.calibration import until_it_stands
from ....precision.base.dtypes import name_of
from ....precision.base.errors import HalfsafeError
from ....precision.base.layer_names import plain_name
from ....precision.base.message import Message, joined
from ....precision.base.modes import FP32
from ....precision.base.patching import Patch, patched
from ....precision.base.text import listed
from ..comfyui.attributes import CAST_DTYPE, INPUT_SCALE, WEIGHT_FUNCTIONS
from ..comfyui.entered import Entered
from ..comfyui.execution import adapts_text, conditions_through, is_compiled, trains
from ..comfyui.layer_forward import STANDING
from ..comfyui.layers import DIFFUSION_MODEL, is_quantized
from ..comfyui.weights import calling_layers, dequantized, is_quantized_bank, numbers_of
from ..compute.executor import Compute, compute_of
from ..compute.per_model import AddsToResults
from ..replay.call import Call
from ..replay.interceptor import LOW_RANK, Acting, Stage, put_stage
from ..replay.model_compiler import repeating
from .low_rank import LowRank, LowRankModel, SortedPatches, is_8bit_matrix, is_left_out

INJECTED, UNFIT = "halfsafe_low_rank", "halfsafe_unfit"
ENCODER_CALLS = ("encode_token_weights", "generate")
"""The methods of a text encoder's model that ComfyUI's ``CLIP`` calls (comfy/sd.py)."""
PASSED_BY = (
    "LoRAs are added to weights in each call instead of to results, because ComfyUI did not run these layers beside "
    "others that it ran, or called them with an argument that is not known: {0}."
)
HOOKED = "A hook applies {0} to '{1}', which 8-bit weights do not support while the model runs."
ON_EXPERTS = "A LoRA or a merge changes '{0}', quantized expert weights, which ComfyUI cannot patch."
IN_WEIGHT = "LoRAs added to the weight in each call, because ComfyUI passes the layer by or its call is not known"
WITHOUT_EFFECT = "LoRAs without effect: calls use neither the layer nor its weight"
logger = logging.getLogger("halfsafe")
PATCHED = "comfy_patched_weights"
"""ComfyUI's mark of a layer whose weights are loaded, and patched (``load`` in
comfy/model_patcher.py)."""


class AddsLowRank(AddsToResults):
    """Extend a ModelPatcher: add LoRAs of 8-bit weights to results. A method without a description
    does what ComfyUI's own does."""

    if TYPE_CHECKING:
        model: torch.nn.Module
        patches: dict

    _sorted: tuple[tuple, SortedPatches] | None = None
    _all_patches: dict | None = None
    _strengths: tuple[tuple, dict] | None = None
    _low_rank: ModelPatcher | None = None

    def clone(self, *args, **kwargs):
        clone = super().clone(*args, **kwargs)
        if not isinstance(clone, AddsLowRank):  # a static clone of a dynamic model is of ComfyUI's own class
            clone.__class__ = _extended(type(clone))  # type: ignore[arg-type]  # a class is hashable
        return clone

    def sorted_patches(self) -> SortedPatches:
        """Sort the patches of 8-bit weights; anew where patches were added, and not while weights
        are loaded."""
        state = self.patches_uuid, len(self.patches), tuple(map(id, self.hook_patches))
        if self._sorted is None or (self._all_patches is None and self._sorted[0] != state):
            self._sorted, self._low_rank = (state, SortedPatches(self)), None
            _tell_left_out(tuple(map(_layer_name, self._sorted[1].unfit)))
        return self._sorted[1]

    def leaves_weights_alone(self) -> bool:
        return self.patches.keys() <= self.sorted_patches().added

    def low_rank_patcher(self) -> ModelPatcher | None:
        """Return the ModelPatcher of the LoRAs, if there are any."""
        changes = self.sorted_patches().low_rank
        if changes and self._low_rank is None:
            dtype = torch.bfloat16 if self._cast_dtype() == torch.bfloat16 else torch.float16
            self._low_rank = LowRankModel.shared(self, changes, dtype)
        return self._low_rank

    def low_rank_model(self) -> LowRankModel:
        """Return the model of the LoRAs; only for a patcher that has some
        (:func:`_has_low_rank`)."""
        return cast(ModelPatcher, self.low_rank_patcher()).model

    def _cast_dtype(self) -> torch.dtype:
        """Return the dtype that weights are cast to; a text encoder has none."""
        return self.get_model_object(CAST_DTYPE) if hasattr(self.model, CAST_DTYPE) else torch.float32

    def _multiplies_in_fp32(self, compute: Compute | None, key: str) -> bool:
        """True if a layer that is given fp32 multiplies in fp32 itself, and not in a 16-bit dtype
        or 8 bits."""
        decision = compute.plan.decisions.get(_layer_name(key)) if compute else None
        mode = decision.mode if decision else name_of(self._cast_dtype()) if compute else FP32.name
        return mode == FP32.name

    def forwards(self) -> list[Patch]:
        """Make the patches that add the LoRAs, at their strengths under the hooks active now."""
        if not _has_low_rank(self):
            return []
        low_rank, modules = self.low_rank_model(), self.sorted_patches().modules
        low_rank.set_strengths(self._strengths_now())
        low_rank.plan_for(compute_of(self), self._multiplies_in_fp32)
        patches: list[Patch] = []
        for key, layer in low_rank.by_key.items():
            of_layer = self._in_weight(key, modules[key]) if key in low_rank.by_weight else layer.beside(modules[key])
            patches += of_layer
        return patches

    def _in_weight(self, key: str, module: torch.nn.Module) -> list[Patch]:
        """Make the patches that add the LoRAs of a layer to its weight in each call, as ComfyUI
        does at low VRAM."""
        patches, by_hooks = self.sorted_patches(), super().get_combined_hook_patches(self.current_hooks)
        own = (self._all_patches or self.patches)[key] if key in patches.added else []
        hooked = by_hooks.get(key, []) if key in patches.hooks else []
        low_rank = self.low_rank_model()

        def added(weight: torch.Tensor) -> torch.Tensor:
            low_rank.asked.add(key)
            whole = weight.to(torch.float32, copy=True)
            return comfy.lora.calculate_weight(self._of_quantized(key, [*own, *hooked]), whole, key).to(weight.dtype)

        return [(module, WEIGHT_FUNCTIONS, [*getattr(module, WEIGHT_FUNCTIONS), added])]

    def passes_to_weights(self, entered: Entered | None) -> bool:
        """Let LoRAs be added to weights where the call that just ended did not add them to results.
        True if there are any, so that the call has to be repeated.

        ``entered``: the calls of modules in it; None for a call that was not watched.
        """
        low_rank, modules = self.low_rank_model(), self.sorted_patches().modules
        waiting = {modules[key]: key for key, layer in low_rank.by_key.items() if key not in low_rank.by_weight}
        missed = [module for module, key in waiting.items() if low_rank.by_key[key].missed]
        if entered is not None:
            runs = {module: entered[low_rank.by_key[key]] for module, key in waiting.items()}
            missed += entered.passed_by(self.model, runs)
        keys = {waiting[module] for module in missed}
        low_rank.by_weight |= keys
        if keys:
            logger.warning("Halfsafe: %s", Message(PASSED_BY, listed(sorted(map(_layer_name, keys)))))
        return bool(keys)

    def _strengths_now(self) -> Mapping:
        patches = self.sorted_patches()
        hooks = self.current_hooks.hooks if self.current_hooks else []
        state = patches, [(hook.hook_ref, hook.strength) for hook in hooks]
        if self._strengths is None or self._strengths[0] != state:
            own, hooked = self._all_patches or self.patches, super().get_combined_hook_patches(self.current_hooks)
            pairs = [(key, patch) for key in patches.added for patch in own[key]]
            pairs += [(key, patch) for key in patches.hooks & hooked.keys() for patch in hooked[key]]
            strengths: Counter = Counter()
            for key, patch in pairs:
                strengths[key, LowRank.of(patch)] += patch[0]
            self._strengths = state, strengths
        return self._strengths[1]

    @contextlib.contextmanager
    def _merging(self) -> Iterator[None]:
        """Leave only what is merged into weights among the patches while the context lasts."""
        added, whole = self.sorted_patches().added, self.patches
        merged = {key: self._of_quantized(key, whole[key]) for key in whole if key not in added}
        self._all_patches, self.patches = whole, merged
        try:
            yield
        finally:
            self.patches, self._all_patches = whole, None

    def load(self, *args, **kwargs):
        with self._merging():
            return super().load(*args, **kwargs)

    def partially_unload(self, *args, **kwargs):
        with self._merging():
            return super().partially_unload(*args, **kwargs)

    def get_combined_hook_patches(self, *args, **kwargs):
        """Return the patches that hooks merge into weights."""
        added, whole = self.sorted_patches().hooks, super().get_combined_hook_patches(*args, **kwargs)
        return {key: value for key, value in whole.items() if key not in added}

    def inject_model(self, *args, **kwargs):
        """Inject ours last, so outermost."""
        # ``eject_model`` of comfy/model_patcher.py keeps the order: what another injection put on a
        # layer goes first.
        if LOW_RANK in self.injections:
            self.injections[LOW_RANK] = self.injections.pop(LOW_RANK)
        return super().inject_model(*args, **kwargs)

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, *args, **kwargs):
        """Refuse hooks that would be merged into a quantized weight, and merge other hooks in
        place."""
        # ComfyUI cannot put it back: its scale is copied into a copy (``copy_to_param`` in
        # comfy/utils.py).
        patches = self.sorted_patches()
        if key in patches.merged and is_quantized(patches.modules[key]):
            reason = patches.merged[key]
            problem = Message(HOOKED, reason, key)
            raise HalfsafeError(problem, "Load the model with storage bf16, or use a LoRA of another kind.")
        # ComfyUI asks ``set_weight`` of a layer to write in place, which its mixed-precision layers
        # refuse by an assert (comfy/ops.py). Where a layer has none, ComfyUI copies the sum into
        # the weight (``copy_to_param``).
        layer = self._layer_of_weight(key)
        if key in combined_patches:
            _refuse_experts(layer, key)
        in_place = [] if layer is None or is_quantized(layer) else [(layer, "set_weight", None)]
        with patched(in_place):
            super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kwargs)

    def model_patches_models(self, *args, **kwargs):
        models = list(super().model_patches_models(*args, **kwargs))
        if patcher := self.low_rank_patcher():
            models.append(patcher)
        return models

    def model_state_dict(self, *args, **kwargs):
        """Dequantize quantized weights, and leave out the names of their scales.

        A loaded weight has the LoRAs of its layer in it, as in ComfyUI.
        """
        # The scales are no attributes, and ``get_key_patches`` of comfy/model_patcher.py reads them
        # as such.
        state, layers = super().model_state_dict(*args, **kwargs), dict(self.model.named_modules())
        named = {name: layers.get(name.rpartition(".")[0]) for name in state}
        kept = {name: state[name] for name, layer in named.items() if not is_quantized(layer) or _has_leaf(layer, name)}
        own = {name for name in kept if name.endswith(".weight")}
        read = {name for name in own if is_quantized(named[name]) or name in self.sorted_patches().added}
        return _Numbers(kept | {name: functools.partial(self._numbers, name, named[name]) for name in read})

    def _numbers(self, key: str, layer: torch.nn.Module) -> torch.Tensor:
        weight = numbers_of(layer)
        added = key in self.sorted_patches().added and getattr(layer, PATCHED, False)
        return self._merged(key, weight) if added else weight

    def _merged(self, key: str, weight: torch.Tensor) -> torch.Tensor:
        whole = weight.to(torch.float32, copy=True)
        return comfy.lora.calculate_weight(self.patches.get(key, []), whole, key).to(weight.dtype)

    def patch_weight_to_device(self, key, device_to=None, *args, return_weight=False, **kwargs):
        """Return numbers, patched once, where the patched weight is asked for."""
        if not return_weight:
            return self._patched_whole(key, device_to, *args, **kwargs)
        layer, held = self._layer_of_weight(key), self.backup.get(key)
        if held is not None and layer is not None:  # ComfyUI patches a loaded weight, which is patched, again.
            return self._merged(key, numbers_of(layer, held.weight).to(device=device_to))
        # ComfyUI's LoraSave writes the codes of a quantized tensor as if they were numbers.
        if layer is not None and is_quantized(layer) and (key not in self.patches or hasattr(layer, INPUT_SCALE)):
            return self._merged(key, numbers_of(layer))
        return dequantized(self._patched_whole(key, device_to, *args, return_weight=True, **kwargs))

    def _layer_of_weight(self, key: str) -> torch.nn.Module | None:
        return comfy.utils.get_attr(self.model, key.removesuffix(".weight")) if key.endswith(".weight") else None

    def _patched_whole(self, key: str, *args, return_weight=False, **kwargs):
        """Patch a weight as ComfyUI does; one that becomes 0 everywhere stays finite."""
        layer = self._layer_of_weight(key)
        if key in self.patches:
            _refuse_experts(layer, key)
        kept = self.patches
        if self._all_patches is None and key in kept:
            self.patches = kept | {key: self._of_quantized(key, kept[key])}
        try:
            done = super().patch_weight_to_device(key, *args, return_weight=return_weight, **kwargs)
        finally:
            self.patches = kept
        weight = done if return_weight else comfy.utils.get_attr(self.model, key)
        if key in self.patches and _is_divided_by_zero(weight):
            zeros = torch.zeros(weight.shape, dtype=weight.params.orig_dtype, device=weight.device)
            weight = weight.requantize_from_float(zeros, scale=1.0)
            return weight if return_weight else comfy.utils.set_attr_param(self.model, key, weight)
        return done

    def _of_quantized(self, key: str, patches: list) -> list:
        """Divide the patches of a layer with ``pre_quant_scale`` by that scale: ComfyUI adds
        patches to the unscaled weight."""
        layer = self._layer_of_weight(key)
        if layer is None or not hasattr(layer, INPUT_SCALE):
            return patches
        divided = functools.partial(_divided, getattr(layer, INPUT_SCALE))
        return [(*rest, offset, functools.partial(divided, offset, own)) for *rest, offset, own in patches]

    def get_key_patches(self, *args, **kwargs):
        """Return, for merges, a weight that has a scale for its inputs as the product of the
        two."""
        patches = super().get_key_patches(*args, **kwargs)
        for name, layer in self.model.named_modules():
            key = f"{name}.weight"
            if hasattr(layer, INPUT_SCALE) and key in patches:
                (weight, convert), *own = patches[key]
                patches[key] = [(weight, functools.partial(_smoothed, convert, layer)), *own]
        return patches

    def model_state_dict_for_saving(self, model=None, prefix=""):
        state, patches = super().model_state_dict_for_saving(model, prefix), self.sorted_patches()
        whole = SimpleNamespace(load_device=self.load_device, patch_weight_to_device=self._patched_whole)
        for tensor in state.values():  # what is patched as it is written asks for it
            caster = getattr(tensor, "caster", tensor)
            if hasattr(caster, "model"):
                caster.model = whole
        # ComfyUI takes a weight that is loaded for one that is patched, and fails on others in
        # int8.
        for key in patches.added:
            weight, name = self._patched_whole(key, self.load_device, return_weight=True), key[len(prefix) :]
            parts = weight.state_dict(name) if is_quantized(patches.modules[key]) else {name: weight}
            state |= {part: tensor.to("cpu") for part, tensor in parts.items() if part in state}
        return state


def _has_low_rank(given: object) -> TypeGuard[AddsLowRank]:
    """True if a patcher adds LoRAs to results."""
    return _keeps_low_rank_unmerged(given) and given.low_rank_patcher() is not None


def _keeps_low_rank_unmerged(given: object) -> TypeGuard[AddsLowRank]:
    """True if a patcher leaves LoRAs out of 8-bit weights, and adds them to results."""
    return isinstance(given, AddsLowRank) and (LOW_RANK in given.injections or _LowRankStage.on(given) is not None)


def keep_low_rank_unmerged(patcher: ModelPatcher) -> None:
    """Make a patcher and all of its later clones add LoRAs of 8-bit weights to results, instead of
    merging them.

    The class leaves them out of the weights; the stage, of a text encoder the injection, adds them.
    A clone has both. ``patcher``: a clone, or of a model just loaded.
    """
    if _keeps_low_rank_unmerged(patcher) or not any(
        is_8bit_matrix(module) or is_quantized(module) for module in patcher.model.modules()
    ):
        return
    if not isinstance(patcher, AddsLowRank):
        patcher.__class__ = _extended(type(patcher))  # type: ignore[arg-type]
    if patcher.patches or patcher.hook_patches:
        # They are merged into the weights where a clone of ComfyUI's class is loaded, which has the
        # same uuid.
        patcher.patches_uuid = uuid.uuid4()
    if isinstance(patcher.model, comfy.model_base.BaseModel):
        put_stage(patcher, LOW_RANK, _LowRankStage())
    else:  # ComfyUI calls text encoders past all wrappers (``encode_from_tokens`` in comfy/sd.py).
        patcher.set_injections(LOW_RANK, [PatcherInjection(_inject, _eject)])


@functools.cache
def _extended(base: type) -> type:
    return type(base.__name__, (AddsLowRank, base), {"__module__": base.__module__})


class _Numbers(UserDict):
    """A state dict that makes some weights as they are read: codes of a quantized weight say
    nothing without its scale.

    It holds a function that returns the weight in place of each of those.
    """

    def __getitem__(self, name):
        held = super().__getitem__(name)
        return held() if callable(held) else held


def _divided(scale: torch.Tensor, offset: tuple | None, own: Callable | None, change: torch.Tensor) -> torch.Tensor:
    """Divide a change of the columns ``offset`` of a weight by a scale for inputs, after the
    change's own function."""
    columns = scale.narrow(0, *offset[1:]) if offset and offset[0] == 1 else scale
    return (own(change) if own else change) / columns.to(change)


def _smoothed(convert: Callable, layer: torch.nn.Module, weight: torch.Tensor, **kwargs) -> torch.Tensor:
    """Convert a weight of a layer as ComfyUI does, and multiply it by the layer's scale for
    inputs."""
    numbers = convert(weight, **kwargs)
    return numbers * getattr(layer, INPUT_SCALE).to(numbers)


def _is_divided_by_zero(weight: torch.Tensor) -> bool:
    """Tell whether all numbers of a quantized weight were divided by a scale of 0, which makes them
    NaN."""
    # ``quantize`` of comfy/quant_ops.py makes such a scale for fp8 and NVFP4 weights that are 0 everywhere.
    return isinstance(weight, QuantizedTensor) and not weight.params.scale.dim() and not weight.params.scale


def _refuse_experts(layer: torch.nn.Module | None, key: str) -> None:
    """Refuse patches of quantized weights of experts."""
    if layer is not None and is_quantized_bank(layer):
        raise HalfsafeError(Message(ON_EXPERTS, key), "Load the model with storage bf16, or leave the LoRA out.")


def _has_leaf(module: torch.nn.Module | None, name: str) -> bool:
    """True if a module has the attribute that the last part of a name says."""
    return hasattr(module, name.rpartition(".")[2])


def _numbers_of(network: torch.nn.Module, state: dict) -> _Numbers:
    """Make the state dict of a network to be read dequantized: ComfyUI's ControlLora copies weights
    without scales."""
    named = {f"{name}.weight": module for name, module in network.named_modules() if is_quantized(module)}
    return _Numbers(state | {name: functools.partial(numbers_of, named[name]) for name in state.keys() & named.keys()})


class _LowRankStage(Stage):
    """Run calls with the LoRAs of 8-bit weights added to the results of their layers.

    While Train LoRA trains they are on the layers for the whole sampler's run: its backward pass
    runs layers again.
    """

    name = LOW_RANK

    def in_call(self, call: Call) -> Acting | None:
        patcher = call.model.current_patcher
        return _LowRankCall(patcher) if _has_low_rank(patcher) and not trains() else None

    def around_sampling(self, executor: Callable, *args, **kwargs):
        """Run a sampler: layers that run on the text before the model's calls have LoRAs too."""
        patcher = executor.class_obj.model_patcher
        if _has_low_rank(patcher) and not is_compiled(patcher):
            patcher.low_rank_model().seen.clear()
        network = patcher.model.diffusion_model
        original = network.state_dict
        numbers = network, "state_dict", lambda *args, **kwargs: _numbers_of(network, original(*args, **kwargs))
        with contextlib.ExitStack() as held:
            held.enter_context(patched([numbers]))
            if trains():
                held.enter_context(_on_layers(patcher))
            elif adapts_text(patcher.model):
                held.enter_context(conditions_through(patcher.model, functools.partial(_with_low_rank, patcher)))
            return executor(*args, **kwargs)


class _LowRankCall(Acting):
    """A call with the LoRAs of a patcher. A call that shows that some cannot be added to results is
    repeated."""

    def __init__(self, patcher: AddsLowRank):
        self.adds, self.low_rank = patcher, patcher.low_rank_model()
        self.entered: Entered | None = None
        self.sizes: tuple = ()

    @contextlib.contextmanager
    def attempt(self, call: Call | None = None) -> Iterator[None]:
        """Add the LoRAs, and watch which layers run in the first call of each size of a sampler's
        run: ComfyUI may multiply past a layer at some sizes only. ``call``: None for a text
        adapter."""
        given = () if call is None else (call.x, call.c_crossattn)
        self.sizes = tuple(getattr(tensor, "shape", None) for tensor in given)
        watched = self.sizes not in self.low_rank.seen
        self.low_rank.ran.clear()
        with contextlib.ExitStack() as held:
            held.enter_context(_on_layers(self.adds))
            self.entered = held.enter_context(Entered.counted()) if watched else None
            yield

    def stands(self, result: object) -> bool:
        """True if each LoRA was added. A call in which a layer did not run that ran before is
        watched in a repeat."""
        seen, ran = self.low_rank.seen, self.low_rank.ran.copy()
        if self.entered is None:
            if ran and seen[self.sizes] - ran - self.low_rank.by_weight and not is_compiled(self.adds):
                del seen[self.sizes]
                return False
        elif self.sizes:
            seen[self.sizes] = ran
        return not self.adds.passes_to_weights(self.entered)


@contextlib.contextmanager
def _on_layers(patcher: AddsLowRank) -> Iterator[None]:
    with patched(patcher.forwards()), calling_layers(patcher.sorted_patches().modules.values()):
        yield


def _with_low_rank(patcher: ModelPatcher, make: Callable):
    """Make conditions with the LoRAs of layers that run on the text."""
    if not _has_low_rank(patcher):
        return make()
    one = _LowRankCall(patcher)

    def attempt():
        with one.attempt():
            return make()

    return until_it_stands([one], attempt)


def _inject(patcher: AddsLowRank) -> None:
    injected = vars(patcher.model).setdefault(INJECTED, [])
    model, patches = patcher.model, patcher.forwards()
    if patches:
        calls = {name: getattr(model, name) for name in ENCODER_CALLS if hasattr(model, name)}
        patches += [(model, name, functools.partial(_call, patcher, call)) for name, call in calls.items()]
    for module, name, value in patches:
        injected.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value


def _eject(patcher: ModelPatcher) -> None:
    """Take off what was injected, also by another clone of the model."""
    # A clone of an injected patcher counts as injected too (``clone`` in comfy/model_patcher.py).
    for module, name, before in vars(patcher.model).pop(INJECTED, []):
        module.__dict__.pop(name, None)
        if before is not None and name not in (STANDING, "forward"):  # what another injection put there is gone
            module.__dict__[name] = before


def _call(patcher: AddsLowRank, call: Callable, *args, **kwargs):
    """Run a call of a text encoder, once more if it shows that some LoRAs cannot be added to
    results."""
    with Entered.counted() as entered:
        result = call(*args, **kwargs)
    if not patcher.passes_to_weights(entered):
        return result
    _eject(patcher)
    _inject(patcher)
    with repeating():
        return call(*args, **kwargs)


def _layer_name(key: str) -> str:
    """Return the name that plans and reports give the layer whose weight has this key."""
    return plain_name(key.removeprefix(DIFFUSION_MODEL)).removesuffix(".weight")


def low_rank_reasons(patcher: ModelPatcher) -> dict[str, str]:
    """Return by layer what was done with the patches of its 8-bit weight, and how many do not fit
    its weight."""
    texts: dict[str, str] = {}
    unfit = dict(_unfit(patcher))
    if _keeps_low_rank_unmerged(patcher):
        patches = patcher.sorted_patches()
        added = "LoRAs added to the layer's output: {0}"
        texts = {key: Message(added, len(of_key)) for key, of_key in patches.low_rank.items()}
        if _has_low_rank(patcher):
            low_rank = patcher.low_rank_model()
            texts |= {key: IN_WEIGHT if key in low_rank.asked else WITHOUT_EFFECT for key in low_rank.by_weight}
        again = "weight quantized again with {0} merged into it"
        texts |= {key: Message(again, why) for key, why in patches.merged.items()}
        unfit |= patches.unfit
    for key, count in unfit.items():
        ignored = Message("LoRAs ignored because they do not fit the weight: {0}", count)
        texts[key] = joined([texts.get(key, ""), ignored], "; ")
    return {_layer_name(key): text for key, text in texts.items()}


def _unfit(patcher: ModelPatcher) -> dict[str, int]:
    """Count by key the patches that do not fit their weight; anew where patches were added."""
    known = vars(patcher).get(UNFIT)
    if known is None or known[0] != patcher.patches_uuid:
        counts = {}
        for key, patches in patcher.patches.items():
            shape = comfy.utils.get_attr(patcher.model, key).shape
            if key.endswith(".weight") and (unfit := sum(is_left_out(patch, shape) for patch in patches)):
                counts[key] = unfit
        known = patcher.patches_uuid, counts
        setattr(patcher, UNFIT, known)
    return known[1]


@functools.cache
def _tell_left_out(layers: tuple[str, ...]) -> None:
    """Log once which layers have LoRAs that do not fit them."""
    if layers:
        logger.warning("Halfsafe: LoRAs do not fit %d layers and are left out: %s", len(layers), listed(layers))
