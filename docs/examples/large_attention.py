"""fp16 attention over large keys: scores that pass fp16's range, and what is done about each.

Keys that share a large offset (Stable Video Diffusion has such) are smoothed, which changes no result; keys that are
large in themselves are computed in fp32; all others are left alone.
"""

import torch
from halfsafe.precision.arithmetic.attention import BoundedAttention, Kernels
from halfsafe.precision.arithmetic.calibration import Calibration

HEADS, TOKENS, SIZE = 4, 64, 64

def relative_error(exact: torch.Tensor, found: torch.Tensor) -> float:
    exact = exact.double()
    return ((found.double() - exact).norm() / exact.norm()).item()


def attention(q, k, v, heads, mask=None, **kwargs):
    """Attention as kernels without a fused softmax compute it: the scores are rounded to the operands' dtype."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def keys(kind: str) -> torch.Tensor:
    noise, offset = torch.randn(1, HEADS, TOKENS, SIZE), torch.randn(SIZE)
    return {"ordinary keys": noise, "keys with an offset": noise + 2000 * offset, "large keys": 3000 * noise}[kind].half()


def main() -> dict[str, tuple[float, float, str]]:
    """Kind of keys -> (error of plain fp16, error of the bounded one, how it ran)."""
    torch.manual_seed(0)
    found = {}
    for kind in ("ordinary keys", "keys with an offset", "large keys"):
        q, k, v = (torch.randn(1, HEADS, TOKENS, SIZE).half() + 1, keys(kind), torch.randn(1, HEADS, TOKENS, SIZE).half())
        bounded = BoundedAttention(Calibration())
        exact = attention(q.double(), k.double(), v.double(), HEADS)

        def call(bounded=bounded, q=q, k=k, v=v):
            bounded.begin()
            return bounded(Kernels(attention, attention, fused=False), q, k, v, HEADS)

        with torch.inference_mode():
            plain, ours = attention(q, k, v, HEADS), bounded.calibration.run(call)
        found[kind] = (relative_error(exact, plain), relative_error(exact, ours), bounded.states[0].mode)
        print(f"{kind}: plain fp16 error {found[kind][0]:.4%}, bounded {found[kind][1]:.4%} ({found[kind][2]})")
    return found


if __name__ == "__main__":
    main()
