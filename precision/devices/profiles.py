"""What each device is expected to do: one row per device profile, with a reason for every entry
that needs one.

The rows are expectations from documentation, driver tables and other people's measurements.
``devices.detect`` confirms them with executed probes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import UnknownProfile
from ..base.message import Message
from .measurements import gain, told

NOT_MEASURED = "Not measured on such a device: Measure my card, in the sidebar, compares it with 16 bit."
GAINS = {"fp8_matmul_gains": "fp8", "int8_matmul_gains": "int8"}
"""A capability that follows from measurements -> their setting."""
CAPABILITIES = {
    "fp16": ("fp16 matmuls are fast.", "fp16 math is slow.", "fp16_gemm"),
    "bf16": (
        "bf16 is native.", "No native bf16; torch emulates it, slower than fp32.", "bf16_native", "bf16_gemm",
    ),
    "fp8_storage": (
        "Weights can be kept in fp8 and widened when used.", "fp8 tensors do not work here.", "fp8_cast",
    ),
    "fp8_matmul": (
        "fp8 matmul units.", "No fp8 matmul units; fp8 weights are widened to 16 bit before the matmul.",
        "fp8_cast", "fp8_matmul",
    ),
    "fp8_matmul_gains": ("fp8 matmuls were measured to be faster.", NOT_MEASURED, "fp8_cast", "fp8_matmul"),
    "fp16_accumulation": (
        "fp16 accumulation doubles the fp16 matmul rate.",
        "fp16 accumulation brings no speed here, only the risk of overflow.", "fp16_gemm", "fp16_accumulation",
    ),
    "fp8_fast_accumulation": (
        "The fp8 fast accumulation switch has an effect here.", "The fp8 fast accumulation switch has no effect here.",
        "fp8_cast", "fp8_matmul",
    ),
    "int8_matmul": (
        "int8 matmul units, which accumulate exactly in int32.",
        "No int8 matmul units; int8 weights are widened before the matmul.", "int8_matmul",
    ),
    "int8_kernels": (
        "comfy-kitchen has int8 kernels for such a device.", "comfy-kitchen has no int8 kernels for such a device.",
        "int8_matmul", "int8_kernels",
    ),
    "int8_matmul_gains": ("int8 matmuls were measured to be faster.", NOT_MEASURED, "int8_matmul", "int8_kernels"),
}  # fmt: skip
"""Each capability of a device, a field of its row -> why it is expected to be on, why to be off,
the probes of it."""

OCP_FP8 = ("fp8_e4m3fn", "fp8_e5m2")
FNUZ_FP8 = ("fp8_e4m3fnuz", "fp8_e5m2fnuz")


@dataclass(frozen=True)
class DeviceProfile:
    """The expectation for one kind of device.

    Args:
        vendor: nvidia, amd, apple, intel or any.
        type: torch device type: cuda (also AMD), mps, xpu or cpu.
        fp16 to int8_kernels: the capabilities, see ``CAPABILITIES``. Those of ``GAINS`` follow from
        ``measurements``.
        fp8_formats: storage names ``torch._scaled_mm`` takes here; MI300 has fnuz only.
        fp8_width: the least of a layer's inputs and outputs from which an fp8 product was measured
            to be faster than in 16 bit with its scale and quantizing; 0 where no width was measured
            to be slower.
        blocks_matmul: ComfyUI multiplies nvfp4 and mxfp8 weights as they are stored here.
        fp16_safe_cost: how much longer than fp16 ``fp16_safe`` takes, least and most of the models
            of benchmarks/results/cost.json on cards of this kind, with weights in VRAM under
            dynamic VRAM; "" where it was not estimated.
        needs_torch: capability -> first (major, minor) of torch that has it on this device.
        notes: capability -> one sentence; other keys are remarks about the device. A note on a
            capability of ``GAINS`` says why it brings no speed, where no ratio was measured.
    """

    name: str
    label: str
    vendor: str
    type: str = "cuda"
    fp16: bool = True
    bf16: bool = True
    fp8_storage: bool = True
    fp8_matmul: bool = False
    fp8_formats: tuple[str, ...] = ()
    fp16_accumulation: bool = False
    fp8_fast_accumulation: bool = False
    int8_matmul: bool = False
    int8_kernels: bool = False
    fp8_width: int = 0
    blocks_matmul: bool = False
    fp16_safe_cost: str = ""
    needs_torch: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def capabilities(self) -> dict[str, bool]:
        """Capability name -> expectation, for the torch that is running."""
        return {name: self.expects(name) and not self.missing_torch(name) for name in CAPABILITIES}

    def expects(self, capability: str) -> bool:
        """True if a capability is expected to be on, for a torch that is new enough."""
        return bool(self.gain(GAINS[capability])) if capability in GAINS else getattr(self, capability)

    def gain(self, setting: str) -> bool | None:
        """True if products in fp8 or int8 were measured to be faster than in 16 bit, False if they
        are not; None if nothing tells."""
        products = f"{setting}_matmul"
        has_none = not getattr(self, products) or f"{products}_gains" in self.notes
        return False if has_none else gain(self.name, setting)

    def missing_torch(self, capability: str) -> str | None:
        """Name in a sentence the torch that a capability needs; None where the running one is new
        enough."""
        needed = self.needs_torch.get(capability)
        if not needed or torch_version() >= needed:
            return None
        return Message("Needs torch {0}.{1}; this is {2}.", needed[0], needed[1], ".".join(map(str, torch_version())))

    def reason(self, capability: str) -> str:
        """Return why the capability is expected to be on or off, as a sentence."""
        expected, (on, off, *_) = self.expects(capability), CAPABILITIES[capability]
        missing = self.missing_torch(capability) if expected else None
        if own := missing or self.notes.get(capability):
            return own
        if capability in GAINS and not getattr(self, products := capability.removesuffix("_gains")):
            return self.reason(products)
        figures = told(self.name, GAINS[capability]) if capability in GAINS else ""
        return figures or (on if expected else off)

    @property
    def remarks(self) -> list[str]:
        """Notes about the device that belong to no capability."""
        return [note for key, note in self.notes.items() if key not in CAPABILITIES]


NO_GAIN = "fp16 accumulation is no faster than fp32 accumulation here and adds the risk of overflow."
GEFORCE_GAIN = "GeForce cards run fp16 accumulation at twice the rate; used in layers where it does not overflow."
NO_CUBLAS = "The fp16 accumulation flag affects NVIDIA's cuBLAS only."
APPLE_NOTES = {
    "fp8_storage": "A table unpacks fp8 weights: torch casts none on MPS below 2.15. Tested on a simulated Mac.",
    "fp8_matmul": "torch has tensor and row scaled fp8 matmul on MPS from 2.15 (PyTorch #194074).",
    "fp8_matmul_gains": "No fp8 units: fp8 saves memory, not time.",
    "fp16_accumulation": NO_CUBLAS,
    "int8_matmul": "torch has int8 matmul on MPS from 2.15 (PyTorch #193153).",
    "int8_matmul_gains": "No int8 kernels for Apple in comfy-kitchen: int8 saves memory, not time.",
}
APPLE: dict[str, Any] = {
    "vendor": "apple", "type": "mps", "fp8_matmul": True, "fp8_formats": ("fp8_e4m3fn",),
    "int8_matmul": True, "needs_torch": {"fp8_matmul": (2, 15), "int8_matmul": (2, 15)},
}  # fmt: skip
GEFORCE: dict[str, Any] = {"fp16_accumulation": True, "needs_torch": {"fp16_accumulation": (2, 7)}}
INT8: dict[str, Any] = {"int8_matmul": True, "int8_kernels": True}
NVFP4 = (
    "nvfp4 files multiply in nvfp4 with a torch for CUDA 13. Qwen-Image-2512 is about 1.8x as fast on an RTX 5090, "
    "where bf16 does not fit (MESHIVEAI/Qwen-Image-2512-NVFP4)."
)
NO_INT8_UNITS = "No int8 tensor cores; comfy-kitchen's int8 kernels need compute capability 7.5."
CDNA_INT8 = "comfy-kitchen's HIP kernels are for RDNA: on CDNA, torch's general operations run int8 products."
TRITON_FIRST = (
    "Triton's int8 products ran at 1.13 to 1.15 times the speed of HIP's, which comfy-kitchen tries first "
    "(comfy-kitchen PR #94; comfy_kitchen.set_backend_priority changes the order)."
)
ARC_INT8 = (
    "ComfyUI unpacks int8 on Intel GPUs; int8 products of OmniXPU gave snow on an Arc B580 (intel/llm-scaler #548)."
)
FP8_NVIDIA: dict[str, Any] = {
    "vendor": "nvidia", "fp8_matmul": True, "fp8_formats": OCP_FP8, **INT8,
}  # fmt: skip

ROWS = (
    DeviceProfile(
        "sm_61", "GTX 10xx, P40 (Pascal)", "nvidia",
        fp16=False, bf16=False,
        notes={"fp16": "fp16 math runs at 1/64 of the fp32 rate.",
               "bf16": "bf16 is emulated, about 1.9x slower than fp32.",
               "fp16_accumulation": "fp16 math is slow here, with or without fp16 accumulation.",
               "int8_matmul": NO_INT8_UNITS},
    ),
    DeviceProfile(
        "sm_70", "V100, Titan V (Volta)", "nvidia",
        fp16_safe_cost="7 to 45 %", bf16=False,
        notes={"bf16": "bf16 is emulated, without cuDNN convolution or Triton kernels.",
               "fp16_accumulation": NO_GAIN, "int8_matmul": NO_INT8_UNITS},
    ),
    DeviceProfile(
        "sm_75", "RTX 20xx, T4 (Turing)", "nvidia",
        fp16_safe_cost="5 to 44 %", bf16=False,
        **GEFORCE, **INT8,
        notes={"fp16_accumulation": GEFORCE_GAIN},
    ),
    DeviceProfile(
        "sm_80", "A100, A30 (Ampere)", "nvidia",
        fp16_safe_cost="12 to 61 %", **INT8,
        notes={"fp16_accumulation": NO_GAIN},
    ),
    DeviceProfile(
        "sm_86", "RTX 30xx (Ampere)", "nvidia",
        fp16_safe_cost="6 to 33 %",
        **GEFORCE, **INT8,
        notes={"fp16_accumulation": GEFORCE_GAIN,
               "compile": "torch.compile cannot convert e4m3fn here (PyTorch #167082): use int8 or 16 bit with it."},
    ),
    DeviceProfile(
        "sm_89", "RTX 40xx, L4, L40 (Ada)",
        fp16_safe_cost="13 to 62 %", fp8_fast_accumulation=True, **GEFORCE, **FP8_NVIDIA,
        notes={"fp16_accumulation": GEFORCE_GAIN,
               "fp8_matmul": "fp8 matmul units, which accumulate in about 22 bits.",
               "fp8_fast_accumulation": "torch takes the switch; its documented effect is on Hopper."},
    ),
    DeviceProfile(
        "sm_90", "H100, H200 (Hopper)",
        fp16_safe_cost="16 to 92 %", fp8_fast_accumulation=True, fp8_width=3072, **FP8_NVIDIA,
        notes={"fp16_accumulation": NO_GAIN,
               "fp8_fast_accumulation": "On keeps about 14 bits of the sums; off promotes them to fp32.",
               "products": "Alone, at four shapes, an H200 takes 0.59 to 1.34 of fp16's time for an fp8 product with "
                           "its quantizing, and 0.93 to 1.55 for an int8 product."},
    ),
    DeviceProfile(
        "sm_100", "B200 (Blackwell)", fp16_safe_cost="17 to 53 %", blocks_matmul=True, **FP8_NVIDIA,
        notes={"fp16_accumulation": "fp16 accumulation is not expected to be faster here.",
               "int8_matmul_gains": "comfy-kitchen's int8 is not faster than bf16 on a GB200 (SGLang #38040).",
               "nvfp4": NVFP4},
    ),
    DeviceProfile(
        "sm_120", "RTX 50xx (Blackwell)",
        fp16_safe_cost="9 to 49 %", blocks_matmul=True,
        **GEFORCE, **FP8_NVIDIA,
        notes={"fp16_accumulation": GEFORCE_GAIN, "nvfp4": NVFP4},
    ),
    DeviceProfile(
        "gfx90a", "MI200 (CDNA2)", "amd",
        int8_matmul=True,
        notes={"fp16_accumulation": NO_CUBLAS, "int8_matmul_gains": CDNA_INT8,
               "denormals": "fp16 and bf16 matmuls flush denormals to zero here (PyTorch numerical accuracy notes)."},
    ),
    DeviceProfile(
        "gfx942", "MI300 (CDNA3)", "amd",
        fp8_formats=FNUZ_FP8, int8_matmul=True,
        notes={"fp16_accumulation": NO_CUBLAS, "int8_matmul_gains": CDNA_INT8,
               "fp8_matmul": "fp8 matmul units for the fnuz formats only: e4m3fn weights are widened to 16 bit."},
    ),
    DeviceProfile(
        "gfx1100", "RX 7000 (RDNA3)", "amd", **INT8,
        notes={"fp16_accumulation": NO_CUBLAS, "fp8_matmul": "No fp8 units: fp8 weights are widened to bf16."},
    ),
    DeviceProfile(
        "gfx1201", "RX 9000 (RDNA4)", "amd",
        fp8_matmul=True, fp8_formats=OCP_FP8, needs_torch={"fp8_matmul": (2, 7)}, **INT8,
        notes={"fp16_accumulation": NO_CUBLAS, "fp8_matmul": "fp8 matmul units; needs ROCm 6.4 or later.",
               "order": TRITON_FIRST},
    ),
    DeviceProfile(
        "mps_m1", "Apple M1, M2",
        bf16=False, **APPLE,
        notes={**APPLE_NOTES, "bf16": "bf16 is emulated (macOS 14 or later), about 50 % slower."},
    ),
    DeviceProfile("mps_m3", "Apple M3 or later", **APPLE, notes=APPLE_NOTES),
    DeviceProfile(
        "xpu", "Intel Arc", "intel", "xpu",
        fp8_matmul=True, fp8_formats=OCP_FP8, needs_torch={"fp8_matmul": (2, 10)},
        notes={"fp16_accumulation": NO_CUBLAS,
               "fp8_matmul_gains": "fp8 matmul is slower than bf16 here: 87 against 101 TFLOPS on an Arc B580 (SDNQ).",
               "int8_matmul": ARC_INT8},
    ),
    DeviceProfile(
        "cpu", "CPU", "any", "cpu", fp16=False, bf16=False, int8_matmul=True,
        notes={"bf16": "No bf16 instructions (AVX512-BF16, AMX): bf16 is emulated.",
               "fp16": "fp16 math is emulated or slow on a CPU.",
               "fp16_accumulation": NO_CUBLAS,
               "fp8_matmul": "It is only emulated here, for tests.",
               "int8_matmul": "int8 matmul is exact on a CPU, but not fast: for tests.",
               "int8_matmul_gains": "comfy-kitchen has no CPU kernels: torch's general operations run int8 products."},
    ),
)  # fmt: skip

PROFILES = {row.name: row for row in ROWS}
PROFILE_NAMES = tuple(PROFILES)


def torch_version() -> tuple[int, int]:
    """Return (major, minor) of the running torch."""
    import torch  # not above: the command line asks for names of devices before it has to wait for torch

    major, minor = re.findall(r"\d+", str(torch.__version__))[:2]
    return int(major), int(minor)


def profile_named(name: str) -> DeviceProfile:
    """Return the row of a code such as ``sm_86``.

    Raises:
        UnknownProfile: no row has that code; names those that exist.
    """
    if name in PROFILES:
        return PROFILES[name]
    advice = Message("Use one of: {0}.", ", ".join(PROFILE_NAMES))
    raise UnknownProfile(Message("There is no device profile '{0}'.", name), advice)
