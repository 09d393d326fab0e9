"""A model of plain torch modules, its weights in fp16, whose products pass fp16's range and stay right.

Products take fp16 operands and give fp32; norms and sums between them are in fp32. On a GPU with tensor cores that is
the fast way; a CPU computes the same numbers. The plain `model.half()` overflows, bf16 is coarse.
"""

import copy

import torch
import torch.nn.functional as F
from halfsafe.precision import apply
from torch import nn


def relative_error(exact: torch.Tensor, found: torch.Tensor) -> float:
    exact = exact.double()
    return ((found.double() - exact).norm() / exact.norm()).item()


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


def main() -> dict[str, float]:
    exact_model, errors = model(), {}
    with torch.inference_mode():
        safe, x = copy.deepcopy(exact_model), torch.randn(2, 16, 96)
        applied = apply(safe, storage="fp16", compute="fp16_safe")
        for name, start in (("first call", x), ("later call, 100 times larger", x * 100)):
            errors[name] = relative_error(exact_model(start), safe(start))
            print(f"fp16 operands, fp32 results, {name}: error {errors[name]:.4%}")
        exact = exact_model(x)
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            plain = copy.deepcopy(exact_model).to(dtype)(x.to(dtype))
            errors[name] = relative_error(exact, plain)
            lost = (~plain.isfinite()).float().mean().item()
            print(f"plain {name}: error {errors[name]:.4%}, {lost:.0%} of the results are NaN or Inf")
    scaled = [name for name, mode in applied.modes().items() if mode == "fp16_scaled"]
    print(f"inputs scaled by a power of two: {', '.join(scaled)}")
    return errors


if __name__ == "__main__":
    main()
