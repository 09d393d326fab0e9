"""A small model in the form of ComfyUI's Qwen-Image 2.1 (``comfy/ldm/qwen_image21/model.py``, 0.37), which 0.30 does not have.

It keeps keys and values of the text for the steps of a run, its blocks add to the picture in place, and its graph of ComfyUI's
model compiler is open around its blocks.
"""

from __future__ import annotations

import contextlib

import comfy.model_prefetch
import comfy.ops
import comfy.sd
import torch
from comfy.ldm.modules.attention import optimized_attention
from support import families

HEADS = 2
operations = comfy.ops.manual_cast


class Block(torch.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = operations.LayerNorm(dim, elementwise_affine=False, dtype=torch.bfloat16)
        for name in ("to_q", "to_k", "to_v", "to_out"):
            setattr(self, name, operations.Linear(dim, dim, bias=False, dtype=torch.bfloat16))
        self.up = operations.Linear(dim, dim * 3, bias=False, dtype=torch.bfloat16)
        self.down = operations.Linear(dim * 3, dim, bias=False, dtype=torch.bfloat16)

    def text(self, states, options):
        """Adds to the states of the text; returns its keys and values."""
        normed = self.norm(states)
        keys, values = self.to_k(normed), self.to_v(normed)
        states.add_(self.to_out(optimized_attention(self.to_q(normed), keys, values, HEADS, transformer_options=options)))
        return keys, values

    def forward(self, x, scale, gate, kept, options):
        normed = self.norm(x) * (1 + scale)
        keys, values = (torch.cat(pair, 1) for pair in zip(kept, (self.to_k(normed), self.to_v(normed)), strict=True))
        x.addcmul_(self.to_out(optimized_attention(self.to_q(normed), keys, values, HEADS, transformer_options=options)), gate)
        return x.add_(self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


class QwenImage21(torch.nn.Module):
    """``filled``: how often keys and values of a text were made for the cache."""

    def __init__(self, context: int, dim: int = 64, channels: int = 16, blocks: int = 3):
        super().__init__()
        self.dtype = torch.bfloat16
        self.txt_in = operations.Linear(context, dim, dtype=torch.bfloat16)
        self.img_in = operations.Linear(channels, dim, dtype=torch.bfloat16)
        self.modulation = operations.Linear(dim, 2 * dim, dtype=torch.bfloat16)
        self.transformer_blocks = torch.nn.ModuleList(Block(dim) for _ in range(blocks))
        self.proj_out = operations.Linear(dim, channels, dtype=torch.bfloat16)
        self.prefix_cache, self.prefix_cache_enabled, self.filled = {}, True, 0

    def reset_prefix_cache(self, enabled: bool) -> None:
        self.prefix_cache, self.prefix_cache_enabled = {}, enabled

    def forward(self, x, timestep, context, *, transformer_options, **kwargs):
        rows, text = self.img_in(x.flatten(2).transpose(1, 2)), self.txt_in(context)
        scale, gate = self.modulation(timestep.to(x.dtype).cos().reshape(-1, 1, 1).expand(-1, 1, rows.shape[-1])).chunk(2, -1)
        off = transformer_options.get("qwen_image21_cache", {}).get("device") == "off" or not self.prefix_cache_enabled
        key = tuple(context.shape), tuple(transformer_options["uuids"])
        cache = {} if off else self.prefix_cache.setdefault(key, {})
        queue = comfy.model_prefetch.make_prefetch_queue(list(self.transformer_blocks), x.device, transformer_options)
        for index, block in enumerate(self.transformer_blocks):
            comfy.model_prefetch.prefetch_queue_pop(queue, x.device, block)
            rows = block(rows, scale, gate, self._kept(block, index, text, cache, off, transformer_options), transformer_options)
        comfy.model_prefetch.prefetch_queue_pop(queue, x.device, None) if queue else None
        return self.proj_out(rows).transpose(1, 2).reshape(x.shape)

    def _kept(self, block, index: int, text, cache: dict, off: bool, options: dict):
        if off:
            return block.text(text, options)
        if index not in cache:
            self.filled += 1
            with getattr(comfy.model_prefetch, "pause_malloc_graph", contextlib.nullcontext)():
                cache[index] = block.text(text, options)
        return cache[index]


def loaded(path, loud: float = 1.0):
    """A patcher of ComfyUI's, loaded from a small Qwen-Image file, with this model in the place of its own.

    ``loud``: a factor on the feed-forward of block 1.
    """
    patcher = comfy.sd.load_diffusion_model(str(path))
    torch.manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        model = QwenImage21(families.CONTEXT_WIDTH["qwen_image"])
        for name, weight in model.named_parameters():
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.0)
            weight.mul_(loud if name in ("transformer_blocks.1.up.weight", "transformer_blocks.1.down.weight") else 1.0)
    patcher.model.diffusion_model = model.requires_grad_(False).eval()
    return patcher
