"""A model of plain torch modules, its weights in fp16, whose products pass fp16's range and stay right.

Products take fp16 operands and give fp32; norms and sums between them are in fp32. On a GPU with tensor cores that is
the fast way; a CPU computes the same numbers. The plain `model.half()` overflows, bf16 is coarse.
"""

import copy
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.arithmetic.patching import patched
from halfsafe.precision.arithmetic.ranges import Ranges
from halfsafe.precision.formats.quantize import relative_error
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    """Four blocks; the hidden values of the first pass 65504, as those of large image models do."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(96) for _ in range(4)))
    blocks[0].up.weight.data.mul_(500)
    blocks[0].down.weight.data.mul_(500)
    return blocks


@contextmanager
def weights_of(module: nn.Linear, x: torch.Tensor, dtype: torch.dtype):
    """What SafeOperation asks for: the weight in ``dtype``, the bias in fp32, both on the input's device."""
    yield module.weight.to(x.device, dtype), module.bias.to(x.device, torch.float32)


class SafeModel:
    """A model with fp16 weights in its Linear layers, the rest in fp32, called as the model is."""

    def __init__(self, module: nn.Module):
        self.module, self.ranges = module, Ranges()
        linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        for layer in linears.values():
            layer.half()
        self.operations = {n: SafeOperation(layer, self.ranges.slot(n), self.ranges, weights_of) for n, layer in linears.items()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with patched((operation.module, "forward", operation) for operation in self.operations.values()):
            return self.ranges.run(lambda: self.module(x))


def main() -> dict[str, float]:
    exact_model, errors = model(), {}
    with torch.inference_mode():
        safe, x = SafeModel(copy.deepcopy(exact_model)), torch.randn(2, 16, 96)
        for name, start in (("first call", x), ("later call, 100 times larger", x * 100)):
            exact = exact_model(start)
            errors[name] = relative_error(exact, safe(start))
            print(f"fp16 operands, fp32 results, {name}: error {errors[name]:.4%}")
        exact = exact_model(x)
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            plain = copy.deepcopy(exact_model).to(dtype)(x.to(dtype))
            errors[name] = relative_error(exact, plain)
            lost = (~plain.isfinite()).float().mean().item()
            print(f"plain {name}: error {errors[name]:.4%}, {lost:.0%} of the results are NaN or Inf")
    for name, operation in safe.operations.items():
        if operation.slot.exponent:
            print(f"{name}: input scaled by 2^-{operation.slot.exponent}")
    return errors


if __name__ == "__main__":
    main()
