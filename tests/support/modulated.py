"""A block whose norm's result model code scales and shifts before two layers multiply it."""

import torch
from halfsafe.precision.arithmetic.bounds.known_norm import KnownNorm
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from support.plain_weights import plain_weights

from .leaf_operations import LeafOperations

WIDTH, TOKENS = 64, 80
WAYS = {
    "addcmul": lambda x, scale, shift: torch.addcmul(shift, x, 1 + scale),
    "addcmul, its operands exchanged": lambda x, scale, shift: torch.addcmul(shift, 1 + scale, x),
    "mul and add": lambda x, scale, shift: x * (1 + scale) + shift,
    "from the other side": lambda x, scale, shift: shift + (1 + scale) * x,
    "through a view": lambda x, scale, shift: torch.addcmul(shift, x.view(1, -1, WIDTH), 1 + scale).view(1, 4, -1, WIDTH).view(1, -1, WIDTH),
}


class Sizes(LeafOperations):
    """List what a call reduces, by the numbers it gives, and count what it casts of the size of a stream."""

    def __init__(self):
        super().__init__()
        self.reductions, self.casts = [], 0

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ("linalg_vector_norm", "amax"):
            self.reductions.append(result.numel())
        if name in ("to", "_to_copy") and result.numel() == TOKENS * WIDTH:
            self.casts += result.dtype == torch.float16 != args[0].dtype
        return result


class Modulated:
    """A norm, what model code makes of it, and two layers: a block before the last layer, which is always measured."""

    def __init__(self, way=WAYS["addcmul"]):
        torch.manual_seed(0)
        self.calibration, self.way = Calibration(), way
        self.calibration.results.allowed = True
        self.module = torch.nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm = KnownNorm(self.module, self.module.forward, self.calibration, plain_weights)
        self.linears = {name: torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False) for name in ("q", "k", "last")}
        self.layers = {name: self.layer(name) for name in self.linears}
        self.x = torch.randn(1, TOKENS, WIDTH)
        self.scale, self.shift = 0.3 * torch.randn(1, 1, WIDTH), torch.randn(1, 1, WIDTH)
        self.met = []

    def layer(self, name):
        scale = self.calibration.scale(f"blocks.0.{name}")
        return SafeOperation(self.linears[name], scale, self.calibration, plain_weights, largest_fp16=None if name == "last" else 128.0)

    def once(self):
        y = self.way(self.norm(self.x), self.scale, self.shift)
        with torch._C.DisableTorchFunctionSubclass():  # model code that asks for it has the result stay in fp32
            self.met.append(y.dtype)
        return self.layers["last"]((self.layers["q"](y) * self.layers["k"](y)).float() + self.x)

    def call(self):
        with torch.inference_mode(), Sizes() as self.seen:
            return self.calibration.run(self.once).float()

    def error(self, result) -> float:
        y = self.way(self.module(self.x), self.scale, self.shift)
        expected = self.linears["last"](self.linears["q"](y) * self.linears["k"](y) + self.x)
        return ((result - expected).norm() / expected.norm()).item()
