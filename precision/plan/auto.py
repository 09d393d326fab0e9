"""What ``auto`` stands for on a device: the compute of a model and the storage of its weights, each
with a reason."""

import sys
from collections.abc import Sequence

from ..base.message import Message, joined
from ..base.options import ComputeOption, RuledCompute, RuledStorage
from ..base.text import size_text
from ..devices.detect import Device
from ..devices.probes import has_cuda_13

ACTIVATION_ROOM = 2 << 30
UNQUANTIZED = ("fp16", "bf16", "fp32", "fp64")
BLOCKS = ("nvfp4", "mxfp8")
"""Storages with a scale for each block of inputs."""
STREAMED = "ComfyUI's dynamic VRAM streams the remaining {0} at each step, so nothing is quantized."
NO_LOW_BITS = "comfy-kitchen's product of 4- and 6-bit weights needs sm_80: on {0} they are unpacked first."
INT8_COMPUTE = ("auto", "int8")
"""Compute options under which weights held in int8 multiply in int8, where that is known or likely
to gain."""
ROTATES_IN_FP32 = "mps"
"""The type of device without int8 kernels whose fp32 products take about as long as 16-bit ones:
rotating a weight back takes a sixteenth of its product with 4,096 rows. Others with no kernel that
does it as it unpacks, a V100 or an Arc, multiply in 16 bit seven times as fast as in fp32."""
NEARER = "int8's error is a quarter of fp8's at the same size, and both are unpacked in each call."
FOR_CUDA_13 = ("torch", "torchvision", "torchaudio", "--index-url", "https://download.pytorch.org/whl/cu130")
SLOW = "int8 is slow here without its kernels."
INSTALL = 'To install them, run "{0}" -m pip install -U {1} and restart ComfyUI.'
IN_CUDA_13 = (
    "One video took 78 s after that, 123 s before (MiniMax H3 on an RTX Pro 6000, torch 2.13 for CUDA 13 after one for "
    "CUDA 12.8, dynamic VRAM on too: nosana-ci/pipeline-templates #164)."
)


def auto_compute(device: Device, supported: Sequence[str], file_dtype: str) -> tuple[RuledCompute, str]:
    """Choose the compute option that ``auto`` stands for, and say why.

    Plain fp16 is taken on NVIDIA cards, for models that ComfyUI lists for fp16 before bf16, and for
    fp16 files: a LoRA or a finetune can take any model out of fp16's range, so each result is
    looked at, and ``fp16_safe`` is the way out. Elsewhere comes bf16 where the device multiplies it
    natively, at the rate of fp16, and the model takes it; else ``fp16_safe``, which is also what a
    model listed for bf16 first gets on a card without bf16.

    ``supported``: the model's own safe compute dtypes in its order of preference, e.g. ("bf16",
    "fp32")."""
    usable = [option for option in supported if option == "fp32" or device.capabilities.get(option)]
    if "fp16" in usable and (file_dtype == "fp16" or usable[0] == "fp16"):
        return _instead_of_fp16(device, supported, file_dtype)
    if usable and usable[0] == "bf16":
        return "bf16", Message("ComfyUI lists bf16 for this model and it is native on {0}.", device.label)
    why = _why_not(device, supported)
    if "bf16" in supported and device.capabilities["fp16"] and not device.capabilities["bf16"]:
        return "fp16_safe", Message("{0} fp16 matmuls with an fp32 stream are fast here and cannot overflow.", why)
    return "fp32", Message("{0} That leaves fp32.", why)


def _instead_of_fp16(device: Device, supported: Sequence[str], file_dtype: str) -> tuple[RuledCompute, str]:
    reason = Message("ComfyUI lists fp16 for this model and it is fast on {0}.", device.label)
    cost = device.profile.fp16_safe_cost
    if cost and (file_dtype == "fp16" or supported[0] == "fp16"):
        after = Message("after a NaN or Inf the model uses fp16_safe, which is estimated to take {0} longer.", cost)
        return "fp16", Message("{0} Each result is checked: {1}", reason, after)
    if "bf16" in supported and device.capabilities["bf16"]:
        native = "bf16 is native too and has the range of fp32. The cost of fp16_safe is not known."
        return "bf16", joined([reason, native])
    if cost:
        return "fp16_safe", Message("{0} fp16_safe cannot overflow; it is estimated to take {1} longer.", reason, cost)
    return "fp16_safe", Message("{0} fp16_safe cannot overflow; its cost here is not known.", reason)


def _why_not(device: Device, supported: Sequence[str]) -> str:
    reasons = [device.reason(option) for option in ("bf16", "fp16") if option in supported]
    unsafe = joined((option for option in ("bf16", "fp16") if option not in supported), " or ")
    return joined([*reasons, unsafe and Message("The model is not safe in plain {0}.", unsafe)])


def auto_storage(
    device: Device,
    weight_bytes_16bit: int,
    file_dtype: str,
    free_device_bytes: int | None,
    compute: ComputeOption = "auto",
    streamed_from: int | None = None,
) -> tuple[RuledStorage, str]:
    """Choose the storage option that ``auto`` stands for, and say why.

    Args:
        file_dtype: storage name of most of the file's weights; anything but fp16, bf16, fp32, fp64 counts as quantized.
        compute: the compute option requested: int8 gains nothing if its weights are dequantized.
        streamed_from: free memory of the host, where weights that do not fit are streamed from it at each step, as
            under ComfyUI's dynamic VRAM; None where they are not.
    """
    if file_dtype not in UNQUANTIZED:
        return held_storage(device, file_dtype)
    if free_device_bytes is None:
        return "as_file", "Kept as in the file: no GPU memory limit is known."
    as_file_bytes = weight_bytes_16bit * {"fp32": 2, "fp64": 4}.get(file_dtype, 1)
    room = free_device_bytes - ACTIVATION_ROOM
    if as_file_bytes <= room:
        sizes = size_text(as_file_bytes), size_text(free_device_bytes)
        return "as_file", Message("The file's {0} fit in {1} of free memory.", *sizes)
    if weight_bytes_16bit <= room:
        shortage = _shortage(file_dtype, as_file_bytes, free_device_bytes)
        return _half(device), Message("{0} In 16 bit they fit.", shortage)
    shortage = _shortage("16 bit", weight_bytes_16bit, free_device_bytes)
    storage, reason = smallest_storage(device, compute)
    if storage == "as_file":
        return storage, Message("{0} {1} The weights will be moved in and out.", shortage, reason)
    half = size_text(weight_bytes_16bit // 2)
    reason = Message("{0} {1} halves the weights to {2}. {3}", shortage, storage.split("_")[0], half, reason)
    if streamed_from is None:
        return storage, reason
    rest = as_file_bytes - room
    if rest > streamed_from:
        could = Message("ComfyUI's dynamic VRAM could stream the remaining {0}.", size_text(rest))
        free = size_text(streamed_from)
        slow = Message("It would be read from disk at each step: only {0} of host memory are free.", free)
        return storage, joined([reason, could, slow])
    kept = "as_file" if as_file_bytes == weight_bytes_16bit else _half(device)
    streams = Message(STREAMED, size_text(rest))
    return kept, joined([shortage, streams, Message("storage={0} halves the weights to {1}.", storage, half)])


def smallest_storage(device: Device, compute: ComputeOption = "auto") -> tuple[RuledStorage, str]:
    """Choose the 8-bit storage for a model, or as_file where there is none, and say why in a
    sentence.

    int8 and fp8 take the same bytes, and int8 has a quarter of fp8's error unpacked, a third
    multiplied. fp8 is chosen where its products are what runs, and where unpacking a rotated weight
    takes long."""
    unpacked = why_int8_is_unpacked(device)
    if compute in INT8_COMPUTE and not unpacked:
        return "int8", Message("int8's error is a third of fp8's. {0}", device.reason("int8_matmul_gains"))
    in_fp8 = compute == "fp8" or (compute in INT8_COMPUTE and device.capabilities["fp8_matmul_gains"])
    rotates = device.capabilities["int8_kernels"] or device.profile.type == ROTATES_IN_FP32
    if device.capabilities["fp8_storage"] and (in_fp8 or not rotates):
        if compute == "fp8":
            return "fp8_e4m3fn", Message("Not int8: compute={0} does not multiply in int8.", compute)
        return "fp8_e4m3fn", Message("Not int8: {0}", why_int8_is_slow(device))
    if rotates:
        return "int8", joined([NEARER, unpacked])
    return "as_file", device.reason("fp8_storage")


def why_int8_is_unpacked(device: Device) -> str:
    """Return why weights held in int8 are unpacked on a device unless compute=int8 is requested; ""
    where they multiply in int8: by kernels of the device, which are not known to bring no speed,
    and on a CPU."""
    # torch's own ``_int_mm``: one core of an EPYC (AVX-512 VNNI, torch 2.11) multiplies 1024 rows by 3072 x 3072 in 92
    # ms, and unpacks and multiplies in 354 ms in fp32; 77 rows in 20 and 164 ms.
    if device.profile.type == "cpu":
        return ""
    for needed in ("int8_matmul", "int8_kernels"):
        if not device.capabilities[needed]:
            return device.reason(needed)
    return device.reason("int8_matmul_gains") if device.profile.gain("int8") is False else ""


def int8_as_run(device: Device) -> str:
    """Return the setting of a :class:`Measurement` that ``auto`` runs weights held in int8 in."""
    return "int8 unpacked" if why_int8_is_unpacked(device) else "int8"


def why_int8_is_slow(device: Device) -> str:
    """Return why a model with int8 weights is not known to be faster than a 16-bit one on a device;
    "" if it is."""
    lacking = (name for name in ("int8_matmul", "int8_matmul_gains") if not device.capabilities[name])
    return next(map(device.reason, lacking), "")


def missing_kernels(device: Device) -> str:
    """Return a message that int8 kernels are missing with which the device would be faster, with
    the command that installs them and the gain measured elsewhere; "" if none are missing."""
    has_them = device.capabilities["int8_kernels"] or not device.capabilities["int8_matmul"]
    if has_them or not device.profile.int8_kernels or device.profile.gain("int8") is False:
        return ""
    old = device.profile.vendor == "nvidia" and not has_cuda_13()
    why = device.reason("int8_kernels")
    packages = " ".join(FOR_CUDA_13) if old else "comfy-kitchen"
    return joined([SLOW, Message(INSTALL, sys.executable, packages), why, IN_CUDA_13 if old else ""])


def why_slow(storage: str, device: Device) -> str:
    """Return why products of weights in fewer than 8 bits or in blocks are not faster than 16-bit
    ones on a device; "" if they are."""
    if storage not in BLOCKS:
        oldest = device.profile.name == "sm_75"  # MIN_SM_VERSION of comfy-kitchen's layout
        return Message(NO_LOW_BITS, device.label) if oldest else why_int8_is_slow(device)
    if not device.profile.blocks_matmul:
        return Message("{0} does not multiply {1}.", device.label, storage)
    needs_torch = not device.simulated and not has_cuda_13()
    return Message("{0} products need a torch for CUDA 13.", storage) if needs_torch else ""


def held_storage(device: Device, file_dtype: str) -> tuple[RuledStorage, str]:
    """Choose the storage of a quantized file, with the reason: as_file if the device can hold it,
    else 16 bit."""
    if file_dtype in UNQUANTIZED:
        return "as_file", ""
    if reason := device.refuses(file_dtype):
        return _half(device), Message("The file is {0}, {1}", file_dtype, reason)
    return "as_file", Message("The file is already {0}.", file_dtype)


def _shortage(what: str, weight_bytes: int, free_bytes: int) -> str:
    needed, free, room = map(size_text, (weight_bytes, free_bytes, ACTIVATION_ROOM))
    return Message(
        "{0} weights take {1}; {2} are free, of which {3} are reserved for activations.", what, needed, free, room
    )


def _half(device: Device) -> RuledStorage:
    return "bf16" if device.capabilities["bf16"] else "fp16"
