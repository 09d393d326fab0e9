"""A pipeline in the manner of diffusers, its weights kept in fp8 and computed in bf16, layer by layer.

The rules decide which layers may be fp8. A weight is stored as fp8 data and one power-of-two scale; its layer's forward
brings it to bf16 for the length of a call. The plain cast, without a scale, is what `layerwise_casting` does.
"""

import copy

import torch
import torch.nn.functional as F
from halfsafe.precision.amax import host_amax
from halfsafe.precision.arithmetic.patching import patched
from halfsafe.precision.formats.quantize import dequantize, quantize, relative_error
from halfsafe.precision.plan.compute import Layer
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.plan.storage import plan_storage
from torch import nn

FP8 = torch.float8_e4m3fn


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


def store(pipe: Pipeline, scaled: bool) -> list:
    """Bring the pipeline to bf16 and its fp8 layers to fp8. Returns the patches that compute with them."""
    patches = []
    for component in pipe.components.values():
        linears = {name: module for name, module in component.named_modules() if isinstance(module, nn.Linear)}
        layers = [Layer(name, "Linear", tuple(module.weight.shape)) for name, module in linears.items()]
        decisions = plan_storage(layers, "fp8_e4m3fn", rules_from())
        weights = {name: module.weight.detach().clone() for name, module in linears.items()}
        component.to(torch.bfloat16)
        for name, decision in decisions.items():
            if decision.storage == "fp8_e4m3fn":
                data, scale = _to_fp8(weights[name]) if scaled else (weights[name].to(FP8), torch.tensor(1.0))
                linears[name].weight = nn.Parameter(data, requires_grad=False)
                patches.append((linears[name], "forward", _forward(linears[name], scale)))
    return patches


def _to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized = quantize(weight, FP8, host_amax(weight))
    return quantized.data, quantized.scale


def _forward(module: nn.Linear, scale: torch.Tensor):
    return lambda x: F.linear(x, dequantize(module.weight, scale, x.dtype), module.bias)


def weight_bytes(pipe: Pipeline) -> int:
    return sum(parameter.nbytes for component in pipe.components.values() for parameter in component.parameters())


def main() -> dict[str, float]:
    torch.manual_seed(0)
    pipe = Pipeline()
    for block in pipe.transformer.blocks:  # small weights behind large norms: fp8 without a scale rounds them to few values
        block.norm.weight.data.mul_(100)
        block.up.weight.data.mul_(0.1)
        block.down.weight.data.mul_(0.1)
    tokens, noise = torch.randint(0, 100, (1, 7)), torch.randn(1, 64, 128)
    errors = {}
    with torch.inference_mode():
        exact = pipe(tokens, noise)
        print(f"fp32: {weight_bytes(pipe) / 1e6:.2f} MB of weights")
        for name, scaled in (("fp8 with scales, computed in bf16", True), ("fp8 by a plain cast, computed in bf16", False)):
            small = copy.deepcopy(pipe)
            with patched(store(small, scaled)):
                errors[name] = relative_error(exact, small(tokens, noise))
            print(f"{name}: {weight_bytes(small) / 1e6:.2f} MB, error {errors[name]:.2%}")
        errors["bf16"] = relative_error(exact, _in_bf16(pipe)(tokens, noise))
        print(f"bf16: error {errors['bf16']:.2%}")
    return errors


def _in_bf16(pipe: Pipeline) -> Pipeline:
    pipe = copy.deepcopy(pipe)
    for component in pipe.components.values():
        component.to(torch.bfloat16)
    return pipe


if __name__ == "__main__":
    main()
