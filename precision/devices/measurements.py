"""Measured speeds of 8 and 4 bits beside 16 bit. What a profile is said to gain follows from these
rows alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..base.message import Message, joined

MARGIN = 1.05
"""Least ratio that is a gain: below it, a difference is within the noise of the measurements."""
BENCH = "https://huggingface.co/datasets/anla1234-itachi/comfyui-quant-bench"
INT8_FAST = "https://github.com/BobJohnson24/ComfyUI-INT8-Fast"
FORGE = "https://github.com/Haoming02/sd-webui-forge-classic"
CORE = "https://github.com/Comfy-Org/ComfyUI"
PACK, PACK_DYNAMIC = "benchmarks/results/gpu_h200.json", "benchmarks/results/gpu_h200_dynamic_vram.json"
RANGE = "{0} ran at {1} times the speed of {2} ({3})."
ONE_CARD = "{0} {1}"
BRIEF = "{storage}: {times} times 16 bit's speed ({cards})"
HERE = "Measured on this card on {0} ({1}): {2}."


@dataclass(frozen=True)
class Measurement:
    """The speed of a setting on one card, relative to another setting in the same program.

    Args:
        card: the card, as the source names it.
        model: the model that ran; "" where the source does not name it.
        setting: int8, fp8 (fp8 products), fp8 unpacked, nvfp4, or a compute option.
        ratio: least and most of speed / speed of ``to``; above 1 is faster.
        to: what it is compared with; fp8 is whatever the program ran fp8 weights in.
        torch: version of torch, "" where the source does not say.
        date: year and month or day, "" where the source does not say.
        source: address of the figure, or a file of the repository.
        remark: what else decided the figure, as kernels of another program.
    """

    card: str
    model: str
    setting: str
    ratio: tuple[float, float]
    to: Literal["16 bit", "fp8", "fp8 unpacked", "mxfp8"]
    torch: str
    date: str
    source: str
    remark: str = ""

    @property
    def times(self) -> str:
        """Return the ratio as text, e.g. "1.84" or "1.04 to 1.07"."""
        return _span(*self.ratio)


def _of_h200(model: str, setting: str, seconds: float) -> Measurement:
    """A whole call of a model on an H200; ``seconds``: its time relative to ComfyUI's own fp16."""
    speed = round(1 / seconds, 2)
    source = PACK_DYNAMIC if "dynamic" in model else PACK
    return Measurement("H200", model, setting, (speed, speed), "16 bit", "2.11.0+cu130", "2026-11-27", source)


MEASURED: dict[str, tuple[Measurement, ...]] = {
    "sm_80": (
        Measurement(
            "A100", "", "int8", (0.33, 0.5), "fp8", "2.10+cu130", "2026-07", f"{CORE}/issues/14824", "ComfyUI 0.27"
        ),
    ),
    "sm_86": (
        Measurement("A10G", "", "int8", (1.84, 1.84), "16 bit", "", "", BENCH),
        Measurement("A10G", "", "fp8 unpacked", (0.97, 0.97), "16 bit", "", "", BENCH),
        Measurement(
            "RTX 3060", "Z-Image", "int8", (2.0, 2.0), "16 bit", "", "2026-01-29", f"{FORGE}/pull/651", "Triton kernels"
        ),
        Measurement(
            "RTX 3090", "Chroma1-HD", "int8", (1.1, 1.1), "16 bit", "", "2026-01-22", f"{INT8_FAST}/issues/4",
            "Triton kernels",
        ),
        Measurement(
            "RTX 3090", "Krea 2 Turbo", "int8", (1.92, 1.92), "fp8", "", "",
            "https://raigor2.github.io/local-inference-benchmarks/int8-comparison/",
        ),
    ),
    "sm_89": (
        Measurement("L40S", "", "int8", (2.06, 2.06), "16 bit", "", "", BENCH),
        Measurement("L40S", "", "fp8", (1.27, 1.27), "16 bit", "", "", BENCH),
        Measurement(
            "RTX 4060 Ti", "Anima", "int8", (1.12, 1.12), "16 bit", "", "2026-07-15", f"{FORGE}/issues/1289",
            "comfy-kitchen 0.2.19",
        ),
        Measurement(
            "RTX 4070 Ti Super", "Z-Image", "int8", (1.76, 1.76), "16 bit", "", "2026-01-29", f"{FORGE}/pull/651",
            "Triton kernels",
        ),
        Measurement(
            "RTX 4070 Ti Super", "Z-Image", "fp8", (1.45, 1.45), "16 bit", "", "2026-01-29", f"{FORGE}/pull/651"
        ),
    ),
    "sm_90": (
        _of_h200("SDXL", "auto", 0.99),
        _of_h200("SDXL", "fp16_safe", 1.24),
        _of_h200("SDXL", "fp8 unpacked", 2.71),
        _of_h200("SDXL", "fp8", 3.49),
        _of_h200("SDXL", "int8", 2.99),
        _of_h200("Flux, dynamic VRAM", "auto", 1.05),
        _of_h200("Flux, dynamic VRAM", "fp16_safe", 1.09),
        _of_h200("Flux, dynamic VRAM", "fp8 unpacked", 1.19),
        _of_h200("Flux, dynamic VRAM", "fp8", 1.54),
        _of_h200("Flux, dynamic VRAM", "int8", 1.49),
    ),
    "sm_100": (
        Measurement(
            "B300", "MiniMax H3", "fp8", (1.07, 1.07), "16 bit", "", "",
            "https://github.com/vllm-project/recipes/pull/766", "vLLM",
        ),
    ),
    "sm_120": (
        Measurement(
            "RTX PRO 6000", "LTX-2.3 22B", "int8", (1.15, 1.15), "16 bit", "", "",
            "https://huggingface.co/LAXMAYDAY/LTX-2.3-22b-dev-int8-tensorwise",
        ),
        Measurement(
            "RTX 5060", "Anima", "int8", (1.07, 1.2), "mxfp8", "", "2026-06-05", f"{INT8_FAST}/issues/69",
            "the least with torch.compile",
        ),
        Measurement(
            "RTX 5090", "Qwen-Image-2512", "nvfp4", (1.8, 1.8), "16 bit", "", "",
            "https://huggingface.co/MESHIVEAI/Qwen-Image-2512-NVFP4", "16 bit does not fit in 32 GB",
        ),
    ),
    "gfx1100": (
        Measurement(
            "RX 7900 XTX", "Krea 2 Turbo", "int8", (0.33, 0.5), "fp8", "", "2026-07-05", f"{CORE}/issues/14777",
            "without comfy-kitchen's HIP backend",
        ),
    ),
    "gfx1201": (
        Measurement("RX 9070 XT", "", "int8", (0.96, 1.04), "16 bit", "", "", f"{CORE}/issues/15084"),
        Measurement("gfx12", "Flux", "fp8", (1.75, 1.75), "fp8 unpacked", "", "", f"{CORE}/issues/8242"),
    ),
}  # fmt: skip
"""Name of a device profile -> what was measured on cards of it."""


def _measured(profile: str, setting: str) -> list[Measurement]:
    """List the measurements of a setting on a device profile."""
    return [row for row in MEASURED.get(profile, ()) if row.setting == setting]


def gain(profile: str, setting: str) -> bool | None:
    """True if each measurement beside 16 bit is faster by :data:`MARGIN`; None if nothing tells.

    Without one beside 16 bit, False if each measurement beside fp8 weights is slower than these:
    fp8 weights are unpacked or multiplied, and are not slower than 16 bit for that reason alone.
    """
    rows = _measured(profile, setting)
    beside_16_bit = gains_in(rows)
    if setting in beside_16_bit:
        return beside_16_bit[setting]
    beside_fp8 = [row.ratio[1] for row in rows if row.to == "fp8"]
    return False if beside_fp8 and max(beside_fp8) < 1 else None


def gains_in(rows: Iterable[Measurement]) -> dict[str, bool]:
    """Map each setting that was measured beside 16 bit to whether each of its rows is faster by
    :data:`MARGIN`."""
    least: dict[str, float] = {}
    for row in rows:
        if row.to == "16 bit":
            least[row.setting] = min(row.ratio[0], least.get(row.setting, math.inf))
    return {setting: ratio > MARGIN for setting, ratio in least.items()}


def told_here(rows: Sequence[Measurement]) -> str:
    """Return the measurements of one model on this machine as a sentence, with date and model; ""
    for none."""
    if not rows:
        return ""
    speeds = joined([Message("{0} {1} of {2}", row.setting, row.times, row.to) for row in rows], ", ")
    return Message(HERE, rows[0].date, rows[0].model, speeds)


def told(profile: str, setting: str, brief: bool = False) -> str:
    """Return what was measured of a setting in one sentence for each thing it was compared with,
    the range first; or ``brief``, beside 16 bit alone.

    Example:
        >>> from halfsafe.precision.devices.measurements import told
        >>> told("sm_86", "int8")
        'int8 ran at 1.10 to 2.00 times the speed of 16 bit (A10G 1.84, RTX 3060 2.00, RTX 3090
        1.10). \
int8 ran at 1.92 times the speed of fp8 (RTX 3090 1.92).'
    """
    rows = _measured(profile, setting)
    sentences = []
    for to in dict.fromkeys(row.to for row in rows):
        beside = [row for row in rows if row.to == to]
        whole = _span(min(row.ratio[0] for row in beside), max(row.ratio[1] for row in beside))
        cards = joined([Message(ONE_CARD, row.card, row.times) for row in beside], ", ")
        if brief and to == "16 bit":
            return Message(BRIEF, storage=setting, times=whole, cards=cards)
        sentences.append(Message(RANGE, setting, whole, to, cards))
    return "" if brief else joined(sentences)


def _span(least: float, most: float) -> str:
    """Return a range of ratios as text, a single figure where both ends are the same."""
    return f"{least:.2f}" if least == most else Message("{0} to {1}", f"{least:.2f}", f"{most:.2f}")
