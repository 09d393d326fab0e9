"""Stand-ins for packs that put layers of their own into a model, which do not cast their weights, each in the way of a real one.

``KINDS``: name -> :class:`Kind`. ``KINDS[name].on(model, dtype)`` returns a clone of a model of ``KINDS[name].family`` with that code on
it, whose layers are in ``dtype``: a dtype of torch, ``ASKED`` for what the model states as the node runs, or ``UNET`` for ComfyUI's
``unet_dtype()`` on an NVIDIA card. Weights are the same in every dtype, rounded to bf16. ``scale`` multiplies what the code adds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import NamedTuple

import comfy.ops
import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.patcher_extension import PatcherInjection, WrappersMP

ASKED, UNET = "asked", "unet"
WEIGHT = 0.5
ROWS = 8


class Kind(NamedTuple):
    """``family``: of ``tests/support/plants.py``. ``put``: changes a clone, given what makes layers. ``off``: takes off what stays on
    the model that all clones share."""

    family: str
    put: Callable
    off: Callable = lambda model: None

    def on(self, model, dtype, scale: float = 1.0):
        clone = model.clone()
        self.put(clone, Layers(stated(model, dtype), scale))
        return clone


def stated(model, dtype) -> torch.dtype:
    if dtype == UNET:
        return torch.float16
    if dtype != ASKED:
        return dtype
    return model.model.manual_cast_dtype or model.model.diffusion_model.dtype


class Layers:
    """Makes layers of torch's own in one dtype, each with weights of its own."""

    def __init__(self, dtype: torch.dtype, scale: float):
        self.dtype, self.scale, self.generator = dtype, scale, torch.Generator().manual_seed(11)

    def cast(self, module: torch.nn.Module) -> torch.nn.Module:
        for weight in module.parameters():
            size = weight[0].numel() ** -0.5 if weight.dim() > 1 else 1.0
            values = (
                torch.randn(weight.shape, generator=self.generator) * size
                if weight.dim() > 1
                else torch.ones(weight.shape)
            )
            weight.data = values.bfloat16().to(self.dtype)
        return module.eval().requires_grad_(False)

    def adapter(self, width: int) -> Adapter:
        return self.cast(Adapter(width, self.scale))

    def linear(self, inputs: int, outputs: int) -> torch.nn.Module:
        return self.cast(torch.nn.Linear(inputs, outputs, bias=False))

    def conv(self, channels: int) -> torch.nn.Module:
        return self.cast(torch.nn.Conv2d(channels, channels, 1, bias=False))

    def rows(self, width: int) -> torch.Tensor:
        return torch.randn(1, ROWS, width, generator=self.generator).bfloat16().to(self.dtype)


class Adapter(torch.nn.Module):
    """As PuLID's attention on Flux's tokens: a norm and a product of torch's own."""

    def __init__(self, width: int, scale: float):
        super().__init__()
        self.norm, self.out, self.scale = (
            torch.nn.LayerNorm(width, bias=False),
            torch.nn.Linear(width, width, bias=False),
            scale,
        )

    def forward(self, x):
        return self.out(self.norm(x)) * (WEIGHT * self.scale)


class Attn2Replace:
    """As IPAdapter's: a second attention with the model's queries, and with keys and values of layers of its own."""

    def __init__(self, layers: Layers, inner: int):
        self.image, self.scale = layers.rows(64), layers.scale
        self.to_k, self.to_v = layers.linear(64, inner), layers.linear(64, inner)

    def __call__(self, q, k, v, extra_options):
        out = optimized_attention(q, k, v, extra_options["n_heads"])
        image = self.image.repeat(len(q), 1, 1)
        added = optimized_attention(q, self.to_k(image), self.to_v(image), extra_options["n_heads"])
        return (out + added * (WEIGHT * self.scale)).to(dtype=q.dtype)


def unet_blocks(model):
    """(name of a block with attention, its number, the width) of a UNet."""
    unet = model.model.diffusion_model
    for where, blocks in (("input", unet.input_blocks), ("output", unet.output_blocks)):
        for number, block in enumerate(blocks):
            for part in block:
                if hasattr(part, "transformer_blocks"):
                    yield where, number, part.transformer_blocks[0].attn2.to_q.weight.shape[0]


def replaced_attention(model, layers: Layers) -> None:
    for where, number, width in unet_blocks(model):
        model.set_model_attn2_replace(Attn2Replace(layers, width), where, number)


def by_width(layers: Layers, make: Callable) -> Callable:
    return functools.cache(functools.partial(make, layers))


def attention_inputs(model, layers: Layers) -> None:
    """As of packs that change what an attention attends to."""
    adapter = by_width(layers, Layers.adapter)

    def patch(n, context, value, extra_options):
        return n, context + adapter(context.shape[-1])(context), value

    model.set_model_attn1_patch(patch)
    model.set_model_attn2_patch(patch)


def attention_results(model, layers: Layers) -> None:
    adapter = by_width(layers, Layers.adapter)

    def patch(n, extra_options):
        return n + adapter(n.shape[-1])(n)

    model.set_model_attn1_output_patch(patch)
    model.set_model_attn2_output_patch(patch)


def blocks_of_unet(model, layers: Layers) -> None:
    conv = by_width(layers, Layers.conv)

    def patch(h, options):
        return h + conv(h.shape[1])(h) * (WEIGHT * layers.scale)

    def last(h, skip, options):
        return h + conv(h.shape[1])(h) * (WEIGHT * layers.scale), skip

    model.set_model_input_block_patch(patch)
    model.set_model_input_block_patch_after_skip(patch)
    model.set_model_output_block_patch(last)


def embedding(model, layers: Layers) -> None:
    adapter = by_width(layers, Layers.adapter)
    model.set_model_emb_patch(lambda emb, channels, options: emb + adapter(emb.shape[-1])(emb))


class MotionModule(torch.nn.Module):
    """As AnimateDiff's: injected after each transformer of the UNet, called by a patch of its own."""

    def __init__(self, layers: Layers, channels: int):
        super().__init__()
        self.adapter = layers.adapter(channels)

    def forward(self, x, context, options):
        return x + self.adapter(x.movedim(1, -1)).movedim(-1, 1)


def call_motion_module(layer, x, emb, context, transformer_options, *args):
    return layer(x, context, transformer_options)


def injected(model, layers: Layers, make: Callable) -> None:
    unet = model.model.diffusion_model
    blocks = [*unet.input_blocks, *unet.output_blocks]
    places = [(block, part) for block in blocks for part in block if hasattr(part, "transformer_blocks")]
    made = [(block, make(layers, part.in_channels)) for block, part in places]

    def inject(patcher):
        for block, module in made:
            block.append(module)

    def eject(patcher):
        for block, _ in made:
            block.pop(-1)

    model.set_injections("foreign", [PatcherInjection(inject=inject, eject=eject)])


def motion_modules(model, layers: Layers) -> None:
    injected(model, layers, MotionModule)
    model.set_model_forward_timestep_embed_patch((MotionModule, call_motion_module))


def plain_modules(model, layers: Layers) -> None:
    """Layers of torch's own among the layers of the UNet, called by ComfyUI's code."""
    injected(model, layers, Layers.conv)


def core_modules(model, layers: Layers) -> None:
    """ComfyUI's own layers, of the class that does not cast, as AnimateDiff's for PIA."""

    def make(layers, channels):
        made = comfy.ops.disable_weight_init.Conv2d(channels, channels, 1, bias=False, dtype=layers.dtype)
        return layers.cast(made)

    injected(model, layers, make)


def double_blocks(model):
    """(name, block as ComfyUI made it, width) of Flux's double blocks; a model may be loaded with another clone's patches."""
    for number in range(len(model.model.diffusion_model.double_blocks)):
        name = f"diffusion_model.double_blocks.{number}"
        yield name, model.get_model_object(name), model.model.diffusion_model.hidden_size


def own_forward(module: torch.nn.Module) -> Callable:
    return functools.partial(type(module).forward, module)


def replaced_forwards(model, layers: Layers) -> None:
    """As of packs for Flux: the forward of each double block by an object patch."""
    for name, block, width in double_blocks(model):
        patch = functools.partial(adapted, own_forward(block), layers.adapter(width))
        model.add_object_patch(f"{name}.forward", patch)


def adapted(own: Callable, adapter: torch.nn.Module, *args, **kwargs):
    img, txt = own(*args, **kwargs)
    return img + adapter(img), txt


def changed_in_place(model, layers: Layers) -> None:
    """As of packs for PuLID on Flux, which set a method on the model that all clones share, with layers beside it."""
    flux = model.model.diffusion_model
    flux.foreign_layers = torch.nn.ModuleList([layers.adapter(flux.params.vec_in_dim)])
    own = functools.partial(type(flux).forward_orig, flux)

    def forward_orig(self, img, img_ids, txt, txt_ids, timesteps, y, *args, **kwargs):
        return own(img, img_ids, txt, txt_ids, timesteps, y + self.foreign_layers[0](y), *args, **kwargs)

    flux.forward_orig = MethodType(forward_orig, flux)


def as_made(model) -> None:
    """Take off what ``changed_in_place`` put on a model."""
    flux = model.model.diffusion_model
    del flux.forward_orig, flux.foreign_layers


class BlockWithAdapter(torch.nn.Module):
    """As IPAdapter's for Flux: in place of a block, which it holds."""

    def __init__(self, block, adapter):
        super().__init__()
        self.block, self.adapter = block, adapter

    def forward(self, *args, **kwargs):
        img, txt = self.block(*args, **kwargs)
        return img + self.adapter(img), txt


def replaced_modules(model, layers: Layers) -> None:
    for name, block, width in double_blocks(model):
        model.add_object_patch(name, BlockWithAdapter(block, layers.adapter(width)))


def replaced_layer(model, layers: Layers) -> None:
    """As of packs that run LoRAs beside a layer: the forward of single layers of the model."""
    for name, block, width in double_blocks(model):
        linear = block.img_mlp[0]
        down, up, own = layers.linear(width, 8), layers.linear(8, linear.weight.shape[0]), own_forward(linear)

        def forward(x, *args, down=down, up=up, own=own, **kwargs):
            return own(x, *args, **kwargs) + up(down(x)) * (WEIGHT * layers.scale)

        model.add_object_patch(f"{name}.img_mlp.0.forward", forward)


def replaced_blocks(model, layers: Layers) -> None:
    for number, (_, _, width) in enumerate(double_blocks(model)):
        own = layers.adapter(width)

        def patch(args, extra, adapter=own):
            out = extra["original_block"](args)
            return {**out, "img": out["img"] + adapter(out["img"])}

        model.set_model_patch_replace(patch, "dit", "double_block", number)


def first_values(model, layers: Layers) -> None:
    adapter = by_width(layers, Layers.adapter)

    def patch(args):
        return {**args, "img": args["img"] + adapter(args["img"].shape[-1])(args["img"])}

    model.set_model_patch(patch, "post_input")


def wrapper(model, layers: Layers) -> None:
    """Around the diffusion model: its text goes through a layer."""
    adapter = by_width(layers, Layers.adapter)

    def run(executor, x, timesteps, context, *args, **kwargs):
        return executor(x, timesteps, context + adapter(context.shape[-1])(context), *args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "foreign", run)


def call_wrapper(model, layers: Layers) -> None:
    """Around the call: it is given the sampler's own latent."""
    adapter = by_width(layers, Layers.adapter)

    def run(apply_model, args):
        x, own = args["input"], adapter(args["input"].shape[-1])
        x = x + own(x.to(layers.dtype)).to(x.dtype)
        return apply_model(x, args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(run)


def overridden(model, layers: Layers) -> None:
    adapter = by_width(layers, Layers.adapter)

    def attend(function, q, k, v, heads, *args, **kwargs):
        return function(q, k, v + adapter(v.shape[-1])(v), heads, *args, **kwargs)

    options = model.model_options["transformer_options"]
    model.model_options["transformer_options"] = {**options, "optimized_attention_override": attend}


def hooked(model, layers: Layers) -> None:
    """Hooks of torch on a layer, as long as the model is loaded for this clone."""
    layer = model.model.diffusion_model.double_blocks[0].img_mlp
    adapter, handles = layers.adapter(layer[-1].weight.shape[0]), []

    def hook(module, args, result):
        return result + adapter(result)

    model.set_injections(
        "foreign",
        [
            PatcherInjection(
                inject=lambda patcher: handles.append(layer.register_forward_hook(hook)),
                eject=lambda patcher: handles.pop().remove(),
            )
        ],
    )


KINDS = {
    "attn2 replaced": Kind("sd15", replaced_attention),
    "inputs of attentions": Kind("sd15", attention_inputs),
    "results of attentions": Kind("sd15", attention_results),
    "blocks of a UNet": Kind("sd15", blocks_of_unet),
    "embedding of a UNet": Kind("sd15", embedding),
    "motion modules": Kind("sd15", motion_modules),
    "torch's layers injected": Kind("sd15", plain_modules),
    "ComfyUI's layers injected": Kind("sd15", core_modules),
    "forwards of blocks": Kind("flux", replaced_forwards),
    "method set on the shared model": Kind("flux", changed_in_place, as_made),
    "modules in place of blocks": Kind("flux", replaced_modules),
    "forwards of layers": Kind("flux", replaced_layer),
    "functions in place of blocks": Kind("flux", replaced_blocks),
    "first values of a DiT": Kind("flux", first_values),
    "wrapper of the diffusion model": Kind("sd15", wrapper),
    "wrapper of the call": Kind("sd15", call_wrapper),
    "attention override": Kind("flux", overridden),
    "hooks": Kind("flux", hooked),
}


def kernel_for_16_bit(out, extra_options):
    """As of FlashAttention."""
    if out.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return out


def kernel_that_asserts(out, extra_options):
    """As of SageAttention."""
    assert out.dtype in (torch.float16, torch.bfloat16), (
        "Input tensors must be in dtype of torch.float16 or torch.bfloat16"
    )
    return out


def kernel_of_one_dtype(out, extra_options):
    """As of xformers: what it multiplies by is in fp16."""
    if out.dtype != torch.float16:
        raise ValueError("Query/Key/Value should either all have the same dtype, or (in the quantized case) int32")
    return out


def without_image(out, extra_options):
    raise ValueError("no image is connected")


def with_other_norms(executor, *args, **kwargs):
    """As AnimateDiff's: norms over other numbers than ComfyUI's, on the classes, for as long as a call runs."""
    torchs, cores = torch.nn.GroupNorm, comfy.ops.disable_weight_init.GroupNorm
    own, own_casting = torchs.forward, cores.forward_comfy_cast_weights

    def forward(self, x):
        return torch.nn.functional.group_norm(x * 2 + 1, self.num_groups, self.weight, self.bias, 1.0)

    def casting(self, x):
        weight, bias = comfy.ops.cast_bias_weight(self, x)[:2]
        return torch.nn.functional.group_norm(x * 2 + 1, self.num_groups, weight, bias, 1.0)

    torchs.forward, cores.forward_comfy_cast_weights = forward, casting
    try:
        return executor(*args, **kwargs)
    finally:
        torchs.forward, cores.forward_comfy_cast_weights = own, own_casting


def beside(own: Callable, adapter: torch.nn.Module) -> Callable:
    """A forward with a layer beside it."""

    def forward(x, *args, **kwargs):
        return own(x, *args, **kwargs) + adapter(x)

    return forward
