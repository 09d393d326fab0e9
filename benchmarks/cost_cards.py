"""How long a kernel takes on a card, estimated from its operations and its bytes, and a call on its host; cost.py tells the assumptions."""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH_SHARE, LAUNCH, READ = 0.85, 2e-6, 20e-6
CPUS = {"server": 1.0, "desktop": 0.5}
"""Kind of CPU -> what a call takes there of what it takes on the one that measured it; a fast desktop core takes half."""
DRIVER = 2.5e-6
"""What a launch takes on the host beyond what a CPU's own kernel does."""
TOYS = {
    "Wan 1.3B": ("Wan", 0.75),
    "Wan 14B": ("Wan", 1.0),
    "Flux": ("Flux", 1.0),
    "SDXL": ("SDXL", 1.0),
    "Qwen-Image": ("Flux", 1.6),
}
"""Model -> the model of host_time.py that stands for it, and how many of its blocks the model has, where a double block counts twice."""


@dataclass(frozen=True)
class Card:
    """``fp16``, ``fp32``: peaks in TFLOPS; ``bandwidth``: GB/s; ``matmul``, ``attention``: share of the peak; ``weights``: how
    they lie by default, in host_time.py's words: ComfyUI has dynamic VRAM on NVIDIA alone; ``wide``: as ``matmul``, for fp16
    products with fp32 results; ``moved``, ``mixed``: share of the bandwidth, ``mixed`` for a kernel of operands in two dtypes."""

    fp16: float
    fp32: float
    bandwidth: float
    matmul: float
    attention: float
    weights: str = "dynamic VRAM, resident"
    wide: float | None = None
    moved: float = BANDWIDTH_SHARE
    mixed: float | None = None

    def share(self, kernel: Kernel) -> float:
        """Share of the peak that a product or attention reaches."""
        if kernel.dtype == "fp32":
            return 0.55 if kernel.kind == "attention" else 0.85
        return {"attention": self.attention, "wide": self.wide or self.matmul}.get(kernel.kind, self.matmul)


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
    # Measured: benchmarks/results/gpu_h200.json and gpu_h200_dynamic_vram.json, means of four shapes; attention is Flux's.
    "H200": Card(989, 67, 4800, 0.71, 0.32, wide=0.64, moved=0.88, mixed=0.40),
    "B200": Card(2250, 75, 8000, 0.65, 0.45),
}


@dataclass
class Kernel:
    """One operation. ``kind``: product, wide (fp32 result of 16-bit operands), attention, mixed (operands in two dtypes)
    or other; ``dtype``: of the first operand; ``layer``: inside of which it ran; ``launches``: two where a reduction of a whole tensor first clears what its blocks meet in.
    """

    layer: str
    kind: str
    dtype: str
    flops: int
    read: int
    written: int
    launches: int = 1

    def seconds(self, card: Card) -> float:
        share = card.mixed if self.kind == "mixed" and card.mixed else card.moved
        moved = (self.read + self.written) / (share * card.bandwidth * 1e9)
        if self.kind in ("other", "mixed"):
            return moved + LAUNCH * self.launches
        peak = card.fp32 if self.dtype == "fp32" else card.fp16
        return max(self.flops / (card.share(self) * peak * 1e12), moved) + LAUNCH
