"""Resolve the storage option of a whole model or text encoder, from its size, its file, the device
and the memory."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from math import prod

from ..base.dtypes import QUANTIZED_NAMES
from ..base.message import Message, joined
from ..base.options import StorageOption
from ..base.text import size_text
from ..formats.layer_plan import AS_FILE, LayerPlan
from ..formats.registry import FORMAT_OF_STORAGE
from ..formats.stored_weight import StoredWeight
from .auto import ACTIVATION_ROOM, BLOCKS, UNQUANTIZED, auto_storage, held_storage, smallest_storage, why_slow
from .choice import Choice, frozen
from .compute import SAFE
from .facts import ModelFacts
from .layers import FEWER_BITS, LoadTarget, plan_storage, why_not_quantized
from .rules import Rules

EIGHT_BITS = ("int8", "fp8_e4m3fn")
PREDICTED_ERROR = {"int8": 0.0089, "w6a8": 0.0184, "w4a8": 0.0617}
"""Relative error of a layer's int8 product, rounded to nearest: mean over MiniLM's layers, in dB in
docs/numbers.md."""
NVFP4_ERROR = 3.5
"""Error of a layer's nvfp4 product for one of its fp8 product: of the trained HunyuanVideo in
docs/numbers.md."""
MANY_SCALES = "the file's fp8 has many scales, ComfyUI's has one: int8 takes the same bytes and is nearer to the file"
UNPACKED_WEIGHTS = "{0} of {1} quantized weights were unpacked to bf16 while loading: the weights take {2}."
Layers = Mapping[str, LayerPlan]
"""Layer name -> plan."""


def choose_storage(
    facts: ModelFacts, storage: StorageOption, computed: Choice, rules: Rules, target: LoadTarget
) -> tuple[Choice[StorageOption], Layers]:
    """Resolve ``storage`` for a model, and plan its layers by name.

    ``computed``: the compute option of the model as resolved.
    """
    choice = _choose(facts, storage, computed, target)
    layers = plan_storage(facts.layers, choice.used, rules)
    if facts.checkpoint.unpacked and storage == "auto":
        return choice, _quantized_as_they_are(facts, layers)
    if smallest_storage(target.device, computed.requested)[0] == "int8":
        layers = _many_scales_in_int8(facts, layers)
    if storage == "auto" and choice.used in EIGHT_BITS and target.free is not None:
        room = target.free - ACTIVATION_ROOM
        if computed.requested != "auto":  # another compute dequantizes them
            target = replace(target, formats={name for name in FEWER_BITS if name in target.formats} - {*BLOCKS})
        return _fitted(facts, choice, layers, rules, target, room)
    return choice, layers


def _choose(facts: ModelFacts, storage: StorageOption, compute: Choice, target: LoadTarget) -> Choice[StorageOption]:
    used: StorageOption
    unpacked = _told_unpacked(facts)
    if storage == AS_FILE:
        used, reason = held_storage(target.device, facts.file_dtype)
        return Choice(storage, used, joined([reason if used != storage else "", unpacked]))
    if storage != "auto":
        return Choice(storage, storage)
    size = 2 * facts.parameters
    own = facts.file_dtype
    if unpacked:
        size = bytes_in_memory(facts.inside.values(), {})
        refused = own not in UNQUANTIZED and target.device.refuses(own)
        own = own if refused else "bf16"
    used, reason = auto_storage(target.device, size, own, target.free, compute.requested, target.streamed_from)
    if unpacked and used in EIGHT_BITS:
        reason = Message("The weights do not fit: those unpacked to bf16 are stored in {0}.", used)
    reason = joined([reason, unpacked])
    enough: StorageOption = "fp16" if compute.used == SAFE else compute.used
    if used == AS_FILE and own == "fp32" and enough != "fp32":
        used = enough
        reason = Message("an fp32 file computed in {0} needs only {1} weights", compute.used, enough)
    fits = target.free is None or not target.streams or size <= target.free - ACTIVATION_ROOM
    if used == AS_FILE and own == "bf16" and enough == "fp16" and fits:
        used = enough
        reason = Message("{0} multiplies in {1}: converted once, not at every step", compute.used, enough)
    return Choice(storage, used, reason)


def _told_unpacked(facts: ModelFacts) -> str:
    """Return which share of the file's quantized weights is in bf16 now, and the bytes of all; ""
    if none is."""
    unpacked = facts.checkpoint.unpacked
    if not unpacked:
        return ""
    quantized = sum(weight.quantized for weight in facts.inside.values())
    size = size_text(bytes_in_memory(facts.inside.values(), {}))
    return Message(UNPACKED_WEIGHTS, len(unpacked), len(unpacked) + quantized, size)


def _quantized_as_they_are(facts: ModelFacts, layers: Layers) -> Layers:
    """Keep the file's storage of the layers that are still quantized."""
    quantized = {facts.names.get(name, "") for name, weight in facts.inside.items() if weight.quantized}
    kept = {name: replace(own, storage=AS_FILE) for name, own in layers.items() if name in quantized}
    return frozen({**layers, **kept})


def _many_scales_in_int8(facts: ModelFacts, layers: Layers) -> Layers:
    """Store fp8 weights with a scale for each row or block in int8 instead of fp8 with one: at the
    same size the error of a small Wan model is 1.1 to 1.2 times that of the file's own numbers,
    with one fp8 scale 1.3 to 1.6 times."""
    many = {facts.names.get(name, "") for name, weight in facts.inside.items() if weight.has_many_scales}
    moved = {
        layer.name: replace(layers[layer.name], storage="int8", why_stored=MANY_SCALES)
        for layer in facts.layers
        if layer.name in many
        and layers[layer.name].storage == AS_FILE
        and not layers[layer.name].why_stored
        and not why_not_quantized("int8", layer.shape, layer.cls)
    }
    return frozen({**layers, **moved})


def _fitted(
    facts: ModelFacts, choice: Choice[StorageOption], layers: Layers, rules: Rules, target: LoadTarget, room: int
) -> tuple[Choice[StorageOption], Layers]:
    """Store the model in the first storage of fewer bits that is fast on the device and fits into
    ``room``, if 8 bits do not fit, and say so."""
    size = _bytes_stored(facts, layers)
    if size <= room:
        return choice, layers
    smaller = {name: plan_storage(facts.layers, name, rules) for name in FEWER_BITS if name in target.formats}
    sizes = {name: _bytes_stored(facts, own) for name, own in smaller.items()}
    fitting = [name for name in smaller if sizes[name] <= room]
    fast = next((name for name in fitting if not why_slow(name, target.device)), None)
    used = choice.used
    held = choice.used.split("_")[0]
    moved = size_text(size - room)
    if fast:
        given = size_text(size), held, fast, size_text(sizes[fast])
        needed = Message("{0} in {1} do not fit either: {2} takes {3}.", *given)
        instead = Message("With storage={0} ComfyUI moves {1} in and out at each step.", used, moved)
        reason = joined([needed, _error_of(fast), instead])
        used = fast
        layers = smaller[fast]
    else:
        why: str = "Fewer bits do not make it fit either."
        if fitting:
            why = Message("{0} storage={1} makes it fit.", why_slow(fitting[0], target.device), fitting[0])
        reason = Message("The model does not fit in {0} either: ComfyUI moves {1} in and out. {2}", held, moved, why)
    return replace(choice, used=used, reason=Message("{0} {1}", choice.reason, reason)), layers


def _error_of(storage: str) -> str:
    if storage not in PREDICTED_ERROR:
        return Message("The error of {0} products is {1} times that of fp8 products.", storage, NVFP4_ERROR)
    shares = (f"{PREDICTED_ERROR[name]:.1%}" for name in (storage, "int8"))
    return Message("The predicted error of a layer's output is {0}, against {1} in int8.", *shares)


def _bytes_stored(facts: ModelFacts, layers: Layers) -> int:
    """Count the bytes of a model's weights as planned by name; what is not quantized counts as 16
    bit."""
    quantized = [layer for layer in facts.layers if layers[layer.name].storage in QUANTIZED_NAMES]
    size = sum(FORMAT_OF_STORAGE[layers[layer.name].storage].stored_bytes(*layer.shape) for layer in quantized)
    return size + 2 * (facts.parameters - sum(prod(layer.shape) for layer in quantized))


def bytes_in_memory(weights: Iterable[StoredWeight], plans: Mapping[str, LayerPlan]) -> int:
    """Count the bytes of a file's weights as planned by name. ``plans``: tensor name -> plan of its
    layer.

    A weight without a plan counts as in the file, or in 16 bit if it is wider.
    """
    size = 0
    for weight in weights:
        storage = plans[weight.name].storage if weight.name in plans else AS_FILE
        if storage in QUANTIZED_NAMES and storage != weight.storage:
            size += FORMAT_OF_STORAGE[storage].stored_bytes(*weight.shape)
        else:
            size += weight.bytes if weight.quantized else min(weight.bytes, 2 * prod(weight.shape))
    return size


def bytes_below_16_bit(weights: Iterable[StoredWeight]) -> int:
    """Count the bytes that quantized weights of a file save compared with 16 bit."""
    return sum(2 * prod(weight.shape) - weight.bytes for weight in weights if weight.quantized)


def choose_encoder_storage(facts: ModelFacts, storage: str, default: str, target: LoadTarget) -> Choice[str]:
    """Resolve the storage of a text encoder.

    ``default``: the dtype ComfyUI keeps text encoders in. An encoder runs once per prompt: 8 bits
    save memory, not time."""
    own = facts.file_dtype
    needed = 2 * facts.parameters
    refused = "" if own in UNQUANTIZED else target.device.refuses(own)
    if storage in ("auto", AS_FILE) and refused:
        return Choice(storage, default, Message("The file is {0}. {1}", own, refused))
    if storage != "auto":
        return Choice(storage, storage)
    if own.startswith("fp8") or own == "quantized":
        return Choice(storage, AS_FILE, "the file is quantized already")
    if target.free is not None and not target.streams and needed > target.free:
        reason = Message("{0} are needed in 16 bit, {1} are free", size_text(needed), size_text(target.free))
        return Choice(storage, smallest_of_encoder(target.formats), reason)
    return Choice(storage, default, "ComfyUI's default for text encoders")


def smallest_of_encoder(formats: Container[str]) -> StorageOption:
    """Choose the 8-bit storage of a text encoder: int8 on every device, if ComfyUI runs it.

    Its error is 0.15 to 0.4 of fp8's in each encoder class of ComfyUI, at the same bytes.
    """
    return "int8" if "int8" in formats else "fp8_e4m3fn"
