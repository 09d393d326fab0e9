"""A pipeline in the manner of diffusers, its weights kept in fp8 and computed in bf16, layer by layer.

The rules decide which layers may be fp8. A weight is stored as fp8 data and one power-of-two scale, and
computed in bf16 each time it is read. The plain cast, without a scale, is what diffusers' `layerwise_casting` does.
"""

import copy

import torch
import torch.nn.functional as F
from halfsafe.precision import Applied, apply
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


class Transformer(nn.Module):
    def __init__(self, width: int = 128, blocks: int = 6):
        super().__init__()
        self.time_embedding = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.proj_out = nn.Linear(width, width)

    def forward(self, x, time):
        x = x + self.time_embedding(time)
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x)


class Pipeline:
    """Three models side by side, as `pipe.text_encoder`, `pipe.transformer` and `pipe.vae`."""

    def __init__(self):
        self.text_encoder = nn.Sequential(nn.Embedding(100, 128), nn.Linear(128, 128))
        self.transformer = Transformer()
        self.vae = nn.Sequential(nn.Conv2d(128, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1))

    @property
    def components(self) -> dict[str, nn.Module]:
        return {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae}

    def __call__(self, tokens, noise):
        text = self.text_encoder(tokens).mean(1, keepdim=True)
        latent = self.transformer(noise.to(text.dtype), text)
        return self.vae(latent.mT.reshape(1, 128, 8, 8))


def stored_in_fp8(pipe: Pipeline) -> Pipeline:
    """A copy of the pipeline in bf16, the weights that the rules allow in fp8 with a scale."""
    return applied(pipe)[0]


def applied(pipe: Pipeline) -> tuple[Pipeline, dict[str, Applied]]:
    pipe = in_bf16(pipe)
    return pipe, {name: apply(component, storage="fp8_e4m3fn") for name, component in pipe.components.items()}


def cast_to_fp8(pipe: Pipeline) -> Pipeline:
    """The same weights rounded to fp8 without a scale."""
    plain, (_, handles) = in_bf16(pipe), applied(pipe)
    for name, handle in handles.items():
        for layer in handle.stored:
            weight = plain.components[name].get_submodule(layer).weight
            weight.data = weight.data.to(torch.float8_e4m3fn).to(weight.dtype)
    return plain


def in_bf16(pipe: Pipeline) -> Pipeline:
    pipe = copy.deepcopy(pipe)
    for component in pipe.components.values():
        component.to(torch.bfloat16)
    return pipe


def weight_bytes(pipe: Pipeline) -> int:
    components = pipe.components.values()
    return sum(tensor.nbytes for component in components for tensor in (*component.parameters(), *component.buffers()))


def main() -> dict[str, float]:
    torch.manual_seed(0)
    pipe = Pipeline()
    for (
        block
    ) in pipe.transformer.blocks:  # small weights behind large norms: fp8 without a scale rounds them to few values
        block.norm.weight.data.mul_(100)
        block.up.weight.data.mul_(0.1)
        block.down.weight.data.mul_(0.1)
    tokens, noise = torch.randint(0, 100, (1, 7)), torch.randn(1, 64, 128)
    errors = {}
    with torch.inference_mode():
        exact = pipe(tokens, noise)
        print(f"fp32: {weight_bytes(pipe) / 1e6:.2f} MB of weights")
        print(f"fp8 with scales: {weight_bytes(stored_in_fp8(pipe)) / 1e6:.2f} MB of weights")
        for name, small in (
            ("fp8 with scales", stored_in_fp8(pipe)),
            ("fp8 by a plain cast", cast_to_fp8(pipe)),
            ("bf16", in_bf16(pipe)),
        ):
            errors[name] = relative_error(exact, small(tokens, noise))
            print(f"{name}, computed in bf16: error {errors[name]:.2%}")
    return errors


if __name__ == "__main__":
    main()
