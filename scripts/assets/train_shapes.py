"""Train the model of tests/assets: a HunyuanVideo small enough to commit that draws coloured shapes in ComfyUI.

    COMFYUI_DIR=<folder> .venv/bin/python scripts/assets/train_shapes.py

HunyuanVideo, because its text tokens sit at position zero: the model learns from them where in the picture it is, and
draws after a few hundred steps. Its text encoder is the seeded random CLIP-L of `tests/support/tiny_models.py`: the
features of a prompt are random but always the same, which is all that a model of 144 shapes needs. The VAE is a Wan VAE.

Everything is seeded; it takes about ten minutes of one core. Each stage is kept in `--work` and not made again, whatever the
options; the files are written at the end. A new run gives a model like the committed one, not the same bits: the first
stage of that one's VAE saw pictures twice as large. `tests/host/graph/test_workflows.py` tells whether it draws.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support import inprocess, shapes, tiny_models  # noqa: E402

DIM, BLOCKS, TEXT_WIDTH, BATCH = 128, 2, 768, 24
VAE_DIM, VAE_BATCH, CROP, LATENT_NOISE = 8, 8, 64, 0.15
UNUSED = (
    r"time_conv$|middle\.[12]$|encoder\.(middle\.0|downsamples\.(1|4|7|10))$|decoder\.upsamples\.(1|2|5|6|9|10|13|14)$"
)
NEGATIVE = ("", "blurry, low quality, watermark")
UNCONDITIONAL = 0.12
SHIFT = 5.0
TRAINED_ON = f"{len(shapes.all_shapes())} coloured shapes"


def main() -> None:
    options = _parse()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    inprocess.setup_comfyui(Path(os.environ["COMFYUI_DIR"]), options.work, "--cpu", "--use-pytorch-cross-attention")
    import comfy.model_management

    prompts = _cached(options.work / "prompts.pt", lambda: encode_prompts(options.work))
    comfy.model_management.in_training = True
    vae = _cached(options.work / "vae.pt", lambda: train_vae(options.vae_steps))
    refined = _cached(options.work / "refined.pt", lambda: refine_decoder(vae, options.vae_steps))
    latents = _cached(options.work / "latents.pt", lambda: make_latents(vae))
    first = _cached(options.work / "first.pt", lambda: train_model(prompts, latents, options.steps, 2e-3))
    model = _cached(options.work / "model.pt", lambda: train_model(prompts, latents, options.steps // 2, 1e-3, first))
    write(options.output / shapes.VAE.name, refined)
    write(options.output / shapes.MODEL.name, model)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "halfsafe-shapes",
        help="where stages are kept; delete it to train anew",
    )
    parser.add_argument("--output", type=Path, default=shapes.ASSETS, help="where to write the two files")
    parser.add_argument("--steps", type=int, default=800, help="training steps of the diffusion model")
    parser.add_argument(
        "--vae-steps", type=int, default=1500, help="training steps of the VAE, and again of its decoder"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    return parser.parse_args()


@torch.no_grad()
def encode_prompts(work: Path) -> dict[str, torch.Tensor]:
    """What ComfyUI's own encoder makes of every prompt: fp16, (78, 768), the pooled features last."""
    import comfy.sd

    path = tiny_models.clip_l(work / "clip_l.safetensors")
    clip = comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.WAN)
    encoded = {}
    for prompt in (*NEGATIVE, *(text for shape in shapes.all_shapes() for text in wordings(shape))):
        features, extra = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))[0]
        encoded[prompt] = torch.cat([features[0], extra["pooled_output"]]).half()
    return encoded


def wordings(shape: shapes.Shape) -> tuple[str, ...]:
    """The ways a shape is asked for in training."""
    if shape.background == "white":
        return shape.prompt(), f"{shape.prompt()} on a white background"
    return (shape.prompt(),)


def train_vae(steps: int) -> dict[str, torch.Tensor]:
    """A Wan VAE for single frames, whose latents have mean 0 and variance 1 in the units the diffusion model sees."""
    model = build_vae()
    normal = torch.nn.BatchNorm3d(16, affine=False, momentum=0.02)
    _train_on_pictures("VAE", model, lambda picture: normal(model.encode(picture)), steps, seed=1)
    return folded(model, normal)


def refine_decoder(tensors: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor]:
    """The VAE with its decoder trained further and its latents left as they are."""
    model = build_vae()
    model.load_state_dict(tensors)
    model.encoder.requires_grad_(False)
    model.conv1.requires_grad_(False)
    _train_on_pictures("VAE's decoder", model, model.encode, steps, seed=4, unit=latent_unit())
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _train_on_pictures(
    name: str, model: torch.nn.Module, encode: Callable, steps: int, seed: int, unit: float = 1.0
) -> None:
    """Make a VAE draw again what it was shown, from latents with noise on them; ``unit``: what 1 is in those latents."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    pictures = crops(VAE_BATCH, CROP, seed)
    for step in _progress(name, steps):
        _set_rate(optimiser, 2e-3, step, steps)
        picture = next(pictures)
        latent = encode(picture)
        noise = LATENT_NOISE * unit * torch.rand(VAE_BATCH, 1, 1, 1, 1)
        difference = model.decode(latent + noise * torch.randn_like(latent)) - picture
        loss = difference.abs().mean() + 2.0 * difference.square().mean()
        _update(optimiser, model, loss)
        _log(step, steps, loss)


def latent_unit() -> float:
    """What one unit of the diffusion model's latents is in the VAE's."""
    import comfy.latent_formats

    return 1.0 / comfy.latent_formats.HunyuanVideo().scale_factor


def build_vae() -> torch.nn.Module:
    """ComfyUI's Wan VAE, narrow, for single frames: what they and plain shapes do not need is zero and stays so."""
    import comfy.ldm.wan.vae

    model = comfy.ldm.wan.vae.WanVAE(dim=VAE_DIM, z_dim=16, temperal_downsample=[False, True, True])
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(weight)
        elif not name.endswith("gamma"):
            _init_convolution(weight)
    for name, module in model.named_modules():
        if re.search(UNUSED, name):
            _switch_off(module)
    return model


def _switch_off(module: torch.nn.Module) -> None:
    """Make a residual block the identity, with weights that say the same, and cheap to train through."""
    for name, weight in module.named_parameters():
        weight.requires_grad_(False)
        if not name.endswith("gamma"):
            torch.nn.init.zeros_(weight)
    module.forward = lambda x, *_, **__: x


def _init_convolution(weight: torch.Tensor) -> None:
    torch.nn.init.zeros_(weight)
    last_frame = weight.data[:, :, -1] if weight.ndim == 5 else weight.data
    torch.nn.init.normal_(last_frame, std=last_frame[0].numel() ** -0.5)


def folded(model: torch.nn.Module, normal: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The VAE's tensors, with the latents' normalisation moved into the 1x1x1 convolutions on either side of them."""
    unit = latent_unit()
    scale = unit / (normal.running_var + normal.eps).sqrt()
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tensors["conv1.weight"][:16] *= scale.view(-1, 1, 1, 1, 1)
    tensors["conv1.bias"][:16] = (tensors["conv1.bias"][:16] - normal.running_mean) * scale
    tensors["conv2.weight"] /= unit
    return tensors


def crops(batch: int, crop: int, seed: int) -> Iterator[torch.Tensor]:
    """Random pieces of random shapes, as the VAE takes them: (batch, 3, 1, crop, crop) in -1..1."""
    chance = random.Random(seed)
    everything = shapes.all_shapes()
    while True:
        pieces = []
        for _ in range(batch):
            picture = placed(chance.choice(everything), chance)
            top, left = (chance.randrange(0, shapes.SIZE - crop + 1) for _ in "yx")
            pieces.append(picture[:, top : top + crop, left : left + crop])
        yield torch.stack(pieces).unsqueeze(2) * 2 - 1


def placed(shape: shapes.Shape, chance: random.Random) -> torch.Tensor:
    """A picture of a shape, a little off the middle."""
    centre = (chance.uniform(-0.12, 0.12), chance.uniform(-0.12, 0.12))
    return shapes.render(shape, centre, chance.uniform(0.58, 0.72))


def make_latents(vae: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The latent of each shape in the middle, in the diffusion model's units: prompt -> (16, 1, 16, 16)."""
    model = build_vae()
    model.load_state_dict(vae)
    latents = {}
    with torch.no_grad():
        for shape in shapes.all_shapes():
            picture = shapes.render(shape, radius=0.68)[None, :, None] * 2 - 1
            latents[shape.prompt()] = (model.encode(picture)[0] / latent_unit()).half()
    return latents


def train_model(
    prompts: dict, latents: dict, steps: int, rate: float, start: dict | None = None
) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors: flow matching as ComfyUI samples HunyuanVideo, averaged over the last steps."""
    model = build_model(prompts)
    model.load_state_dict(start or model.state_dict())
    for name, module in model.double_blocks.named_modules():
        if name.endswith(("norm1", "norm2")):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    examples = examples_of(prompts, latents)
    for step in _progress("diffusion model", steps):
        _set_rate(optimiser, rate, step, steps)
        text, clean = next(examples)
        sigma = shifted(torch.rand(BATCH))
        noise, level = torch.randn_like(clean), sigma.view(-1, 1, 1, 1, 1)
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(level * noise + (1 - level) * clean, sigma * 1000, text[:, :-1], y=text[:, -1])
        loss = (velocity.float() - (noise - clean)).square().mean()
        _update(optimiser, model, loss)
        averaged.update_parameters(model)
        _log(step, steps, loss)
    return {name: tensor.detach() for name, tensor in averaged.module.state_dict().items()}


def shifted(uniform: torch.Tensor) -> torch.Tensor:
    """Noise levels in 0..1, denser where ComfyUI's schedule has its steps."""
    return SHIFT * uniform / (1 + (SHIFT - 1) * uniform)


def build_model(prompts: dict[str, torch.Tensor]) -> torch.nn.Module:
    """ComfyUI's HunyuanVideo, one attention head wide, double blocks only."""
    import comfy.ops
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    model = HunyuanVideo(
        in_channels=16, out_channels=16, vec_in_dim=TEXT_WIDTH, context_in_dim=TEXT_WIDTH, hidden_size=DIM, mlp_ratio=4.0,
        num_heads=1, depth=BLOCKS, depth_single_blocks=0, axes_dim=[16, 56, 56], theta=256, patch_size=[1, 2, 2],
        qkv_bias=True, guidance_embed=False, byt5=False, meanflow=False, use_cond_type_embedding=False,
        vision_in_dim=None, meanflow_sum=False, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    for name, weight in model.named_parameters():
        _init_parameter(name, weight)
    _start_as_identity(model)
    _start_from_whitened_text(model, prompts)
    return model


def _init_parameter(name: str, weight: torch.Tensor) -> None:
    if "norm" in name and name.endswith("weight"):
        torch.nn.init.ones_(weight)
    elif weight.ndim == 1 or name.startswith("final_layer"):
        torch.nn.init.zeros_(weight)
    else:
        into_stream = name.endswith(("proj.weight", "mlp.2.weight"))
        torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5 * (0.3 if into_stream else 1.0))
    if name.endswith("_mod.lin.bias"):
        gates = weight.data.view(6, -1)
        gates[2], gates[5] = 1.0, 1.0
    elif name.endswith("adaLN_modulation.1.bias") and "refiner" in name:
        torch.nn.init.ones_(weight)


def _start_as_identity(model: torch.nn.Module) -> None:
    """Carry the noisy latent through the stream to the last layer, so that training starts at velocity = input."""
    channel, row, column = (index.flatten() for index in torch.meshgrid(*map(torch.arange, (16, 2, 2)), indexing="ij"))
    stream = torch.arange(64)
    model.img_in.proj.weight.data[stream, channel, 0, row, column] += 1.0
    model.final_layer.linear.weight.data[channel * 4 + row * 2 + column, stream] = 0.5**0.5


def _start_from_whitened_text(model: torch.nn.Module, prompts: dict[str, torch.Tensor]) -> None:
    """Make the text inputs show what differs between prompts: the features of a random encoder are mostly alike."""
    features = torch.stack(list(prompts.values())).float()
    for layer in (model.txt_in.input_embedder, model.txt_in.c_embedder.in_layer):
        _show_differences(layer, features[:, :-1])
    _show_differences(model.vector_in.in_layer, features[:, -1:])


def _show_differences(layer: torch.nn.Linear, features: torch.Tensor) -> None:
    """Set a layer's rows to principal components, with both signs, of the differences between prompts at one place."""
    differences = (features - features.mean(dim=0)).flatten(0, 1)[::7]
    _, scales, directions = torch.linalg.svd(differences, full_matrices=False)
    count = min(DIM // 2, int((scales > 1e-3 * scales[0]).sum()))
    project = directions[:count] / (scales[:count, None] * len(differences) ** -0.5)
    layer.weight.data[: 2 * count] = torch.cat([project, -project])
    layer.bias.data[: 2 * count] = layer.weight.data[: 2 * count] @ -features.mean(dim=(0, 1))


def examples_of(prompts: dict, latents: dict) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of text features (batch, 78, 768) and latents (batch, 16, 1, 16, 16), in fp32."""
    chance = random.Random(3)
    everything = shapes.all_shapes()
    while True:
        chosen = [chance.choice(everything) for _ in range(BATCH)]
        texts = [chance.choice(NEGATIVE if chance.random() < UNCONDITIONAL else wordings(s)) for s in chosen]
        pictures = [latents[s.prompt()] for s in chosen]
        yield torch.stack([prompts[text] for text in texts]).float(), torch.stack(pictures).float()


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "title": "Halfsafe shapes", "trained_on": TRAINED_ON, "license": "MIT"}
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    print(f"Wrote {path}, {path.stat().st_size / 1e6:.2f} MB")


def _cached(path: Path, make: Callable[[], dict]) -> dict:
    torch.manual_seed(0)
    if not path.exists():
        torch.save(make(), path)
    return torch.load(path, weights_only=True)


def _update(optimiser: torch.optim.Optimizer, model: torch.nn.Module, loss: torch.Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def _set_rate(optimiser: torch.optim.Optimizer, rate: float, step: int, steps: int) -> None:
    factor = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimiser.param_groups:
        group["lr"] = rate * factor


_started = time.monotonic()


def _progress(name: str, steps: int) -> Iterator[int]:
    global _started
    _started = time.monotonic()
    print(f"Training the {name} ...", flush=True)
    yield from range(steps)


def _log(step: int, steps: int, loss: torch.Tensor) -> None:
    if step % 50 == 0 or step == steps - 1:
        print(f"  step {step} of {steps}: loss {loss.item():.4f}, {time.monotonic() - _started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
