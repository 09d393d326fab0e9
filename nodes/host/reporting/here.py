"""What ComfyUI does here: the facts that decide how fast a run is, each with the switch that changes it."""

from collections import Counter
from collections.abc import Callable, Iterator

import comfy.memory_management
import comfy.model_management
import comfy.quant_ops
import torch
from comfy.cli_args import PerformanceFeature, args
from comfy.ldm.modules.attention import optimized_attention

from ....precision.base.message import Message, joined
from ....precision.base.text import size_text
from ....precision.devices.measurements import told_here
from ....precision.devices.probes import has_cuda_13
from ....precision.plan.auto import why_int8_is_slow
from ..comfyui.attributes import OVERRIDE, caches_in_int8, compiler_is_off, has_kitchen_attention, kernel_of_file
from ..compute.attention import ATTENTIONS, KITCHEN, function_name
from ..load.devices import compute_device, current_device
from ..load.kept_speeds import kept_speeds

COMPILER_SWITCH = {False: "--disable-comfy-compiler", True: "without --disable-comfy-compiler"}
SWITCHES = "--use-pytorch-cross-attention, --use-sage-attention"
SWITCHES_WITH_KITCHEN = "--use-pytorch-cross-attention, --use-sage-attention, --use-ck-attention"
NO_HIP = "COMFY_KITCHEN_DISABLE_HIP=1"
"""Leaves comfy-kitchen's HIP kernels out (``_register`` in its backends/hip/__init__.py): an RX 6400 and an RX 6600 XT
became slow with them, the first stayed so without (patientx-cfz/comfyui-rocm#97, Comfy-Org/ComfyUI#15878)."""
CRASHES = "gfx1151"
"""Where comfy-kitchen's attention crashed (Comfy-Org/comfy-kitchen#110)."""
FAST = "--fast: {0}"
FELL_BACK = "ComfyUI found no flash attention (AOTriton) for {0} in this torch"
CRASHED = "it crashed on {0} (Comfy-Org/comfy-kitchen#110)"
OF_NODE = "{0} in {1}, as a node requests"
FILES_OWN = "{0} in {1} attentions of {2}, as its file requests"
NOT_HERE = "the file of {2} requests {0} in {1} attentions, which this device does not support"
INT8_CACHE = "{0} keeps keys and values in int8 in {1} attentions, as its file or --use-ck-attention requests"
ALL_ON, PART_ON = "{0}, all of {1} on the device", "{0}, {2} of {1} on the device"
NONE_ON = "{0}, {1}, not on the device"
SHOWN = 3
"""Models of which it is told what was measured, the last ones."""


def facts_here() -> list[dict[str, str]]:
    """List the five facts, as ComfyUI runs at this moment: ``what`` each is about, what is so
    ``here``, and the ``switch`` that changes it: text for people, empty where none would change
    anything."""
    return [
        _fact("kernels", _kernels(), joined(_other_kernels(), ", ")),
        _compiler(),
        _dynamic_vram(),
        _fact("attention", joined(_attention(), "; "), _of_gpu(_attention_switches())),
        _fact("loaded", joined(_loaded(), "; ") or "nothing yet", _of_gpu("--reserve-vram, --lowvram, --highvram")),
    ]


def _fact(what: str, here: str, switch: str) -> dict[str, str]:
    return {"what": what, "here": here, "switch": switch}


def _of_gpu(switch: str) -> str:
    return "" if compute_device().type == "cpu" else switch


def _other_kernels() -> Iterator[str]:
    """Name what adds or removes kernels: CUDA 13 has comfy-kitchen's int8 products, its Triton backend is off by
    default."""
    if compute_device().type == "cuda":
        if torch.version.cuda and not has_cuda_13():
            yield "a torch for CUDA 13"
        yield "--enable-triton-backend"
        if "hip" in _backends():
            yield NO_HIP


def _backends() -> list[str]:
    """List comfy-kitchen's backends with kernels of their own that run here."""
    kitchen = getattr(comfy.quant_ops, "ck", None)  # absent where ComfyUI could not import comfy-kitchen
    backends = kitchen.list_backends() if kitchen else {}
    return [
        name for name, state in backends.items() if state["available"] and not state["disabled"] and name != "eager"
    ]


def _kernels() -> str:
    own = _backends()
    toolkits = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    built = [f"torch {torch.__version__}", *(f"{name} {version}" for name, version in toolkits.items() if version)]
    kernels = Message("comfy-kitchen's kernels: {0}", ", ".join(own)) if own else "no native 8-bit kernels"
    device = current_device()
    measured = joined(told_here(one.speeds) for one in kept_speeds(device)[:SHOWN])
    order = device.profile.notes.get("order", "") if "hip" in own else ""
    asks_for_sums = device.profile.vendor == "amd" and PerformanceFeature.Fp16Accumulation in getattr(args, "fast", ())
    sums = Message(FAST, device.reason("fp16_accumulation")) if asks_for_sums else ""
    about = joined([measured or why_int8_is_slow(device), order, sums])
    return joined([joined([", ".join(built), kernels], "; "), about], ". ")


def _compiler() -> dict[str, str]:
    off = compiler_is_off(args)
    if off is None:
        return _fact("compiler", "this ComfyUI has none", _of_gpu("ComfyUI 0.34 or later"))
    return _fact("compiler", "off" if off else "on", _of_gpu(COMPILER_SWITCH[off]))


def _dynamic_vram() -> dict[str, str]:
    if not comfy.memory_management.aimdo_enabled:
        reserved = size_text(comfy.model_management.extra_reserved_memory())
        estimated = Message("off: ComfyUI estimates how much to load and leaves {0} free", reserved)
        return _fact("dynamic VRAM", estimated, _of_gpu("--enable-dynamic-vram, --reserve-vram"))
    running = Message("on, {0} of headroom", size_text(args.vram_headroom * 2**30))
    read = Message("{0}; weights are read from a fast disk when used", running) if args.fast_disk else running
    return _fact("dynamic VRAM", read, "--disable-dynamic-vram, --vram-headroom, --fast-disk")


def _attention() -> Iterator[str]:
    """Name ComfyUI's attention, what nodes chose for loaded models, and what their files ask for (``ComfyAttention``,
    ComfyUI 0.38)."""
    yield _named(optimized_attention)
    arch = _amd_architecture()
    asked = getattr(args, "use_quad_cross_attention", False)
    if arch and function_name(optimized_attention) == "attention_sub_quad" and not asked:
        # What ComfyUI falls back to without a word where its probe of AOTriton fails (Comfy-Org/ComfyUI#16526).
        yield Message(FELL_BACK, arch)
    if arch == CRASHES and function_name(optimized_attention) == KITCHEN:
        yield Message(CRASHED, arch)
    for loaded in comfy.model_management.current_loaded_models:
        options = loaded.model.model_options if loaded.model is not None else {}
        if override := options.get("transformer_options", {}).get(OVERRIDE):
            yield Message(OF_NODE, _named(override, overrides=True), type(loaded.model.model).__name__)
    for model in _models():
        if count := sum(caches_in_int8(module, compute_device()) for module in model.modules()):
            yield Message(INT8_CACHE, type(model).__name__, count)
        asked = Counter(filter(None, map(kernel_of_file, model.modules())))
        for (kernel, is_there), count in asked.items():
            yield Message(FILES_OWN if is_there else NOT_HERE, kernel, count, type(model).__name__)


def _named(attention: Callable, overrides: bool = False) -> str:
    name = function_name(attention, overrides)
    return ATTENTIONS.get(name, name)


def _attention_switches() -> str:
    return SWITCHES_WITH_KITCHEN if has_kitchen_attention(args) and _amd_architecture() != CRASHES else SWITCHES


def _amd_architecture() -> str:
    """Return the name of an AMD GPU's architecture, such as gfx1151; "" for other devices."""
    device = compute_device()
    if device.type != "cuda" or not torch.version.hip:
        return ""
    return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]


def _models() -> list[torch.nn.Module]:
    return [loaded.model.model for loaded in comfy.model_management.current_loaded_models if loaded.model is not None]


def _loaded() -> Iterator[str]:
    for loaded in comfy.model_management.current_loaded_models:
        if loaded.model is None:  # it was freed since
            continue
        there, size = loaded.model_loaded_memory(), loaded.model_memory()
        sentence = ALL_ON if there >= size else PART_ON if there else NONE_ON
        yield Message(sentence, type(loaded.model.model).__name__, size_text(size), size_text(there))
