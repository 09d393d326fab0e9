"""What ComfyUI does here: the facts that decide how fast a run is, each with the switch that changes it."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import comfy.memory_management
import comfy.model_management
import comfy.quant_ops
import torch
from comfy.cli_args import args
from comfy.ldm.modules.attention import optimized_attention

from ....precision.base.message import Message, joined
from ....precision.base.text import size_text
from ....precision.devices.probes import has_cuda_13
from ....precision.plan.auto import why_int8_is_slow
from ..comfyui.attributes import OVERRIDE, compiler_is_off, has_kitchen_attention, kernel_of_file
from ..compute.attention import ATTENTIONS, chosen_by, function_name
from ..load.devices import compute_device, current_device

COMPILER_SWITCH = {False: "--disable-comfy-compiler", True: "without --disable-comfy-compiler"}
SWITCHES = "--use-pytorch-cross-attention, --use-sage-attention"
SWITCHES_WITH_KITCHEN = "--use-pytorch-cross-attention, --use-sage-attention, --use-ck-attention"
OF_NODE = "{0} in {1}, as a node requests"
FILES_OWN = "{0} in {1} attentions of {2}, as its file requests"
NOT_HERE = "the file of {2} requests {0} in {1} attentions, which this device does not support"
ALL_ON, PART_ON = "{0}, all of {1} on the device", "{0}, {2} of {1} on the device"
NONE_ON = "{0}, {1}, not on the device"


@dataclass(frozen=True)
class Fact:
    """One fact. ``what`` it is about, what is so ``here``, and the ``switch`` that changes it: text for people, empty
    where none would change anything."""

    what: str
    here: str
    switch: str


def facts_here() -> list[Fact]:
    """List the five facts, as ComfyUI runs at this moment."""
    return [
        Fact("kernels", _kernels(), joined(_other_kernels(), ", ")),
        _compiler(),
        _dynamic_vram(),
        Fact("attention", joined(_attention(), "; "), _of_gpu(_attention_switches())),
        Fact("loaded", joined(_loaded(), "; ") or "nothing yet", _of_gpu("--reserve-vram, --lowvram, --highvram")),
    ]


def _of_gpu(switch: str) -> str:
    return "" if compute_device().type == "cpu" else switch


def _other_kernels() -> Iterator[str]:
    """Name what adds kernels: CUDA 13 has comfy-kitchen's int8 products, its Triton backend is off by default."""
    if compute_device().type == "cuda":
        if torch.version.cuda and not has_cuda_13():
            yield "a torch for CUDA 13"
        yield "--enable-triton-backend"


def _kernels() -> str:
    kitchen = getattr(comfy.quant_ops, "ck", None)  # absent where ComfyUI could not import comfy-kitchen
    backends = kitchen.list_backends() if kitchen else {}
    own = [name for name, state in backends.items() if state["available"] and not state["disabled"] and name != "eager"]
    toolkits = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    built = [f"torch {torch.__version__}", *(f"{name} {version}" for name, version in toolkits.items() if version)]
    kernels = Message("comfy-kitchen's kernels: {0}", ", ".join(own)) if own else "no native 8-bit kernels"
    return joined([joined([", ".join(built), kernels], "; "), why_int8_is_slow(current_device())], ". ")


def _compiler() -> Fact:
    off = compiler_is_off(args)
    if off is None:
        return Fact("compiler", "this ComfyUI has none", _of_gpu("ComfyUI 0.34 or later"))
    return Fact("compiler", "off" if off else "on", _of_gpu(COMPILER_SWITCH[off]))


def _dynamic_vram() -> Fact:
    if not comfy.memory_management.aimdo_enabled:
        reserved = size_text(comfy.model_management.extra_reserved_memory())
        estimated = Message("off: ComfyUI estimates how much to load and leaves {0} free", reserved)
        return Fact("dynamic VRAM", estimated, _of_gpu("--enable-dynamic-vram, --reserve-vram"))
    running = Message("on, {0} of headroom", size_text(args.vram_headroom * 2**30))
    read = Message("{0}; weights are read from a fast disk when used", running) if args.fast_disk else running
    return Fact("dynamic VRAM", read, "--disable-dynamic-vram, --vram-headroom, --fast-disk")


def _attention() -> Iterator[str]:
    """Name ComfyUI's attention, what nodes chose for loaded models, and what their files ask for (``ComfyAttention``,
    ComfyUI 0.38)."""
    yield _named(optimized_attention)
    for loaded in comfy.model_management.current_loaded_models:
        options = loaded.model.model_options if loaded.model is not None else {}
        if override := options.get("transformer_options", {}).get(OVERRIDE):
            yield Message(OF_NODE, _named(chosen_by(override)), type(loaded.model.model).__name__)
    for model in _models():
        asked = Counter(filter(None, map(kernel_of_file, model.modules())))
        for (kernel, is_there), count in asked.items():
            yield Message(FILES_OWN if is_there else NOT_HERE, kernel, count, type(model).__name__)


def _named(attention: Callable) -> str:
    name = function_name(attention)
    return ATTENTIONS.get(name, name)


def _attention_switches() -> str:
    return SWITCHES_WITH_KITCHEN if has_kitchen_attention(args) else SWITCHES


def _models() -> list[torch.nn.Module]:
    return [loaded.model.model for loaded in comfy.model_management.current_loaded_models if loaded.model is not None]


def _loaded() -> Iterator[str]:
    for loaded in comfy.model_management.current_loaded_models:
        if loaded.model is None:  # it was freed since
            continue
        there, size = loaded.model_loaded_memory(), loaded.model_memory()
        sentence = ALL_ON if there >= size else PART_ON if there else NONE_ON
        yield Message(sentence, type(loaded.model.model).__name__, size_text(size), size_text(there))
