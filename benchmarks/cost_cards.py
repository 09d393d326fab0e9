"""How long a kernel takes on a card, estimated from its operations and its bytes, and a call on its host; cost.py tells the assumptions."""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH_SHARE, LAUNCH, READ = 0.85, 2e-6, 20e-6
CPUS = {"server": 1.0, "desktop": 0.5}
"""Kind of CPU -> what a call takes there of what it takes on the one that measured it; a fast desktop core takes half."""
DRIVER = 2.5e-6
"""What a launch takes on the host beyond what a CPU's own kernel does."""
TOYS = {"Wan 1.3B": ("Wan", 0.75), "Wan 14B": ("Wan", 1.0), "Flux": ("Flux", 1.0), "SDXL": ("SDXL", 1.0), "Qwen-Image": ("Flux", 1.6)}
"""Model -> the model of host_time.py that stands for it, and how many of its blocks the model has, where a double block counts twice."""


@dataclass(frozen=True)
class Card:
    """``fp16``, ``fp32``: peaks in TFLOPS; ``bandwidth``: GB/s; ``matmul``, ``attention``: share of the peak; ``weights``: how
    they lie by default, in host_time.py's words: ComfyUI has dynamic VRAM on NVIDIA alone."""

    fp16: float
    fp32: float
    bandwidth: float
    matmul: float
    attention: float
    weights: str = "dynamic VRAM, resident"


CARDS = {
    "T4": Card(65, 8.1, 320, 0.45, 0.30),
    "V100": Card(112, 15.7, 900, 0.80, 0.35),
    "2080 Ti": Card(53.8, 13.4, 616, 0.85, 0.40),
    "RX 6800": Card(32.3, 16.2, 512, 0.25, 0.20, "ready"),
    "M1 Max": Card(20.8, 10.4, 400, 0.30, 0.20, "ready"),
    "A100": Card(312, 19.5, 2039, 0.80, 0.60),
    "3090": Card(71, 35.6, 936, 0.85, 0.60),
    "4090": Card(165, 82.6, 1008, 0.80, 0.65),
    "5090": Card(209.5, 104.8, 1792, 0.80, 0.65),
    "H100": Card(989, 67, 3350, 0.70, 0.50),
    "B200": Card(2250, 75, 8000, 0.65, 0.45),
}


@dataclass
class Kernel:
    """One operation. ``kind``: product, attention or other; ``dtype``: of the operands; ``layer``: inside of which it ran;
    ``launches``: two where a reduction of a whole tensor first clears what its blocks meet in.
    """

    layer: str
    kind: str
    dtype: str
    flops: int
    read: int
    written: int
    launches: int = 1

    def seconds(self, card: Card) -> float:
        moved = (self.read + self.written) / (BANDWIDTH_SHARE * card.bandwidth * 1e9)
        if self.kind == "other":
            return moved + LAUNCH * self.launches
        if self.dtype == "fp32":
            speed = card.fp32 * (0.85 if self.kind == "product" else 0.55)
        else:
            speed = card.fp16 * (card.matmul if self.kind == "product" else card.attention)
        return max(self.flops / (speed * 1e12), moved) + LAUNCH
