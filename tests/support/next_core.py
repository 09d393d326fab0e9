"""A stand-in for the ComfyUI after 0.39, whose layers are called with more than an input (Comfy-Org/ComfyUI#16816): the pinned core, given that call.

``Linear.forward(input, input_act, act_weight, residual, residual_scale)`` is ``residual + residual_scale * linear(act(input))``. The model code of
Wan, of MiniMax H3 and of every ``Sequential`` of two linear layers with a GELU between them calls it so here, and ``linear_input_act`` is gone.
The parameters are those that four independent adapters to that ComfyUI name; ``act_weight`` is the norm whose weight the activation multiplies by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

FOLDED = ("input_act", "act_weight", "residual", "residual_scale")


def folding(plain: Callable, fused: Callable) -> Callable:
    """Give a Linear's forward the arguments of the next ComfyUI. ``fused``: its ``linear_input_act``, with int8 kernels."""

    def forward(self, input, input_act=None, act_weight=None, residual=None, residual_scale=None):
        is_int8 = getattr(self, "quant_format", None) == "int8_tensorwise"
        unfused = (
            input_act in (None, "rms_norm") or getattr(self, "_full_precision_mm", False) or len(self.weight_function)
        )
        if unfused or not is_int8:
            result = plain(self, eager_input_act(input, input_act, act_weight))
        else:
            result = fused(self, input, input_act)
        if residual is None:
            return result
        return residual + result if residual_scale is None else torch.addcmul(residual, result, residual_scale)

    forward.__module__ = "comfy.ops"  # the pack takes a layer class of any other module for another pack's
    return forward


def eager_input_act(x, input_act, act_weight=None):
    """ComfyUI's own ``_eager_input_act``, by which adapters to that ComfyUI compute a folded activation."""
    from comfy.ops import INPUT_ACT_EAGER

    if input_act is None:
        return x
    return act_weight(x) if input_act == "rms_norm" else INPUT_ACT_EAGER[input_act](x)


def operand_of(args: tuple, kwargs: dict) -> torch.Tensor:
    """What a layer that is called with these arguments multiplies."""
    x, *more = args
    folded = {**dict(zip(FOLDED, more, strict=False)), **kwargs}
    return eager_input_act(x, folded.get("input_act"), folded.get("act_weight"))


def bypass(plain: Callable) -> Callable:
    """ComfyUI's LoRA in bypass mode, which multiplies the activated input (Comfy-Org/ComfyUI#16862)."""

    def _bypass_forward(self, x, *args, **kwargs):
        folded = {**dict(zip(FOLDED, args, strict=False)), **kwargs}
        result = plain(self, operand_of((x, *args), kwargs))
        residual, scale = folded.get("residual"), folded.get("residual_scale")
        if residual is None:
            return result
        return residual + result if scale is None else torch.addcmul(residual, result, scale)

    return _bypass_forward


def folded_sequence(self, input):
    """Run a ``Sequential``; of two linear layers with an activation between them, the activation is folded into the second."""
    from comfy.ops import disable_weight_init

    kinds = (disable_weight_init.Linear, torch.nn.GELU, disable_weight_init.Linear)
    of_these = len(self) == 3 and all(map(isinstance, self, kinds))
    if of_these and self[1].approximate == "tanh":
        return self[2](self[0](input), input_act="gelu_tanh")
    for module in self:
        input = module(input)
    return input


def wan_block(self, x, e, freqs, context, context_img_len=257, transformer_options={}):  # noqa: B006
    """Wan's block with its feed-forward's activation and residual folded into ``ffn.2``, and one residual without a scale."""
    from comfy.ldm.wan.model import repeat_e
    from comfy.model_management import cast_to

    modulation = cast_to(self.modulation, dtype=x.dtype, device=x.device)
    e = (modulation + e).chunk(6, dim=1) if e.ndim < 4 else (modulation.unsqueeze(0) + e).unbind(2)
    x = x.contiguous()
    attended = self.self_attn(
        torch.addcmul(repeat_e(e[0], x), self.norm1(x), 1 + repeat_e(e[1], x)),
        freqs,
        transformer_options=transformer_options,
    )
    x = torch.addcmul(x, attended, repeat_e(e[2], x))
    x = x + self.cross_attn(
        self.norm3(x), context, context_img_len=context_img_len, transformer_options=transformer_options
    )
    for patch in transformer_options.get("patches", {}).get("attn2_patch", ()):
        x = patch({"x": x, "transformer_options": transformer_options})
    hidden = self.ffn[0](torch.addcmul(repeat_e(e[3], x), self.norm2(x), 1 + repeat_e(e[4], x)))
    return self.ffn[2](hidden, "gelu_tanh", residual=x, residual_scale=repeat_e(e[5], x))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Have the pinned ComfyUI call its layers as the next one does while the context lasts."""
    pytest.importorskip(
        "comfy.ldm.minimax.model", reason="ComfyUI 0.29 computes no activation of a layer, which the stand-in calls"
    )
    import comfy.ldm.minimax.model
    import comfy.ldm.wan.model
    import comfy.ops
    import comfy.weight_adapter.bypass

    if not hasattr(comfy.ops, "linear_input_act"):  # installed already
        yield
        return
    with contextlib.ExitStack() as undo:

        def exchange(owner, name: str, value) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        fused, mixed = comfy.ops.linear_input_act, comfy.ops.mixed_precision_ops

        def mixed_precision_ops(*args, **kwargs):
            made = mixed(*args, **kwargs)
            made.Linear.forward = folding(made.Linear.forward, fused)
            return made

        comfy.ops._eager_input_act = eager_input_act
        undo.callback(delattr, comfy.ops, "_eager_input_act")
        exchange(
            comfy.ops.disable_weight_init.Linear,
            "forward",
            folding(comfy.ops.disable_weight_init.Linear.forward, fused),
        )
        exchange(comfy.ops, "mixed_precision_ops", mixed_precision_ops)
        exchange(torch.nn.Sequential, "forward", folded_sequence)
        exchange(comfy.ldm.wan.model.WanAttentionBlock, "forward", wan_block)
        exchange(comfy.ldm.minimax.model.MLP, "forward", lambda self, x: self.fc2(self.fc1(x), input_act="swiglu"))
        hook = comfy.weight_adapter.bypass.BypassForwardHook
        exchange(hook, "_bypass_forward", bypass(hook._bypass_forward))
        undo.callback(setattr, comfy.ops, "linear_input_act", fused)
        del comfy.ops.linear_input_act
        yield
