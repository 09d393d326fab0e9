"""ComfyUI's dynamic VRAM on a CPU: how weights are lent to layers, without comfy-aimdo's memory.

The protocol is that of ``comfy/ops.py`` (``cast_bias_weight``, ``cast_modules_with_vbar``, ``uncast_bias_weight``) and
``comfy/model_prefetch.py``; a weight is made of what was transferred by ComfyUI's own ``resolve_cast_module_with_vbar``,
which adds LoRAs in place. What was given back is overwritten with NaN.

``aimdo_stubbed`` is for counting functions: all of ComfyUI's own code runs, and comfy-aimdo's calls return at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import comfy.memory_management
import comfy.model_management
import comfy.model_prefetch
import comfy.ops
import comfy_aimdo.torch
import pytest
import torch
from comfy.memory_management import interpret_gathered_like, tensors_to_geometries, vram_aligned_size
from comfy.model_patcher import LowVramPatch
from comfy.quant_ops import QuantizedTensor

POISON = 255  # NaN in fp32, bf16, fp16 and fp8
WAYS = ("transferred", "prefetched", "resident")
SIGNATURE = b"1"


@contextlib.contextmanager
def dynamic_vram(model, way: str, patches: dict | None = None) -> Iterator[DynamicVram]:
    """The layers of a ModelPatcher's model, which is loaded and has no patches, take their weights as under dynamic VRAM.

    Args:
        way: ``transferred``: there is no VRAM to spare, and each layer's weights are copied to one buffer; ``prefetched``:
            the same, for a whole block before it runs; ``resident``: what was copied stays in VRAM.
        patches: of a ModelPatcher with a LoRA.
    """
    lender = DynamicVram(model, way, patches or {})
    hooks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.ops, "cast_bias_weight", lender.cast)
        patch.setattr(comfy.ops, "uncast_bias_weight", lender.uncast)
        if way == "prefetched":
            for block in model.model.diffusion_model.blocks:
                hooks.append(block.register_forward_pre_hook(lambda block, _: lender.prefetch(block)))
                hooks.append(block.register_forward_hook(lambda block, *_: lender.end_prefetch(block)))
        try:
            yield lender
        finally:
            lender.end()
            for hook in hooks:
                hook.remove()


class DynamicVram:
    """Lends the weights. ``lent``: how often; ``out``: the modules whose weights were not given back yet."""

    def __init__(self, model, way: str, patches: dict):
        self.resident = way == "resident"
        self.signature = SIGNATURE if self.resident else None
        self.lent = 0
        self.out: list[torch.nn.Module] = []
        self._core = comfy.ops.cast_bias_weight, comfy.ops.uncast_bias_weight
        self._modules = {
            name: module
            for name, module in model.model.diffusion_model.named_modules()
            if isinstance(module, comfy.ops.CastWeightBiasOp) and getattr(module, "weight", None) is not None
        }
        largest = max(_size(module) for module in self._modules.values())
        self._buffer = torch.full((largest,), POISON, dtype=torch.uint8)
        for name, module in self._modules.items():
            self._set_up(f"diffusion_model.{name}", module, patches)

    def _set_up(self, key: str, module, patches: dict) -> None:
        """As ``ModelPatcherDynamic.load`` does."""
        module.__dict__.update(
            _v=(self, module, _size(module)), _v_signature=None, seed_key=key, was_cast=module.comfy_cast_weights
        )
        module.comfy_cast_weights = True
        for name in ("weight", "bias"):
            parameter = getattr(module, name, None)
            if parameter is not None and not isinstance(parameter, QuantizedTensor):
                parameter._model_dtype = getattr(module, f"{name}_comfy_model_dtype", None) or parameter.dtype
            found = LowVramPatch(f"{key}.{name}", patches) if f"{key}.{name}" in patches else None
            setattr(module, f"{name}_lowvram_function", found)

    def end(self) -> None:
        comfy.model_prefetch.PREFETCH_QUEUES.clear()
        for module in self._modules.values():
            module.comfy_cast_weights = module.was_cast
            for name in ("_v", "_v_signature", "_v_weight", "_v_bias", "_prefetch", "was_cast"):
                module.__dict__.pop(name, None)
            module.weight_lowvram_function = module.bias_lowvram_function = None

    def cast(self, module, input=None, dtype=None, device=None, bias_dtype=None, offloadable=False, **options):
        if not hasattr(module, "_v"):
            return self._core[0](module, input, dtype, device, bias_dtype, offloadable, **options)
        assert offloadable, "what is not given back cannot be offloaded"
        if dtype is None:
            dtype = input.params.orig_dtype if isinstance(input, QuantizedTensor) else input.dtype
        prefetched = hasattr(module, "_prefetch")
        if not prefetched:
            assert not self.out, "the buffer still holds another layer's weight"
            self._transfer(module, self._buffer)
        compute_dtype, requant = options.get("compute_dtype"), options.get("want_requant", False)
        bias_dtype = dtype if bias_dtype is None else bias_dtype
        resolve = comfy.ops.resolve_cast_module_with_vbar
        weight, bias = resolve(module, dtype, device or input.device, bias_dtype, compute_dtype, requant)
        if not prefetched:
            del module._prefetch
        self.lent += 1
        self.out.append(module)
        return weight, bias, (self, prefetched)

    def fault(self, module, size: int) -> bytes | None:
        """As ``vbar_fault`` of comfy-aimdo, whoever asks it in ComfyUI's place."""
        if self.resident:
            self.lent += 1
            self.out.append(module)
        return self.signature

    def unpin(self, module, size: int) -> None:
        self.out.remove(module)

    def uncast(self, module, weight, bias, token) -> None:
        if not (isinstance(token, tuple) and token and token[0] is self):
            return self._core[1](module, weight, bias, token)
        self.out.remove(module)
        if not token[1] and not self.resident:
            self._buffer.fill_(POISON)
        return None

    def evict(self) -> None:
        """Give the pages of all layers to another model in between."""
        self.signature = b"2"
        for module in self._modules.values():
            module._v_weight.view(torch.uint8).fill_(POISON)

    def _transfer(self, module, buffer: torch.Tensor) -> None:
        signature = self.signature
        if signature is not None and module._v_signature == signature:
            module._prefetch = {"signature": signature, "resident": True}
            return
        source = [module.weight, module.bias]
        buffer = torch.empty(_size(module), dtype=torch.uint8) if self.resident else buffer
        for tensor, place in zip(source, interpret_gathered_like(source, buffer), strict=True):
            if tensor is not None:
                place.copy_(tensor)
        geometry = tensors_to_geometries(source)
        needs_cast = any(
            tensor is not None and tensor.dtype != cast.dtype for tensor, cast in zip(source, geometry, strict=True)
        )
        module._prefetch = {
            **{
                "signature": signature,
                "resident": False,
                "xfer_dest": buffer,
                "cast_dest": None,
                "needs_cast": needs_cast,
            },
            "cast_geometry": geometry,
        }

    def prefetch(self, block: torch.nn.Module) -> None:
        modules = [module for module in block.modules() if hasattr(module, "_v")]
        assert not any(hasattr(module, "_prefetch") for module in modules), (
            "the pages of an earlier call are still pinned"
        )
        for module in modules:
            self._transfer(module, torch.empty(_size(module), dtype=torch.uint8))
        comfy.model_prefetch.PREFETCH_QUEUES.append([(None, (block, modules))])

    def end_prefetch(self, block: torch.nn.Module) -> None:
        for module in block.modules():
            if hasattr(module, "_prefetch"):
                module._prefetch["xfer_dest"].fill_(POISON)
                del module._prefetch


def _size(module) -> int:
    return vram_aligned_size([module.weight, module.bias])


@contextlib.contextmanager
def aimdo_stubbed(*models, state: str) -> Iterator[None]:
    """ComfyUI's own functions run as under dynamic VRAM, for the matrices of models that are loaded and have no patches;
    smaller weights lie on the device, as ``ModelPatcherDynamic.load`` puts them there.

    Args:
        state: ``resident``: weights stay in VRAM once a call has copied them there; ``streamed``: there is no VRAM to
            spare, and each layer copies its weights from pinned memory in each call.
    """
    stream, buffer = _Stream(), _Buffer()
    management = comfy.model_management
    with pytest.MonkeyPatch.context() as patch:
        for model in models:
            for module in model.model.diffusion_model.modules():
                weight = getattr(module, "weight", None) if isinstance(module, comfy.ops.CastWeightBiasOp) else None
                if weight is not None and weight.dim() > 1:
                    _lend_by_aimdo(module, state, buffer, patch)
        # A CPU stands for the device, beside weights elsewhere.
        patch.setattr(management, "is_device_cpu", lambda device: management.is_device_type(device, "no device"))
        patch.setattr(comfy.ops, "materialize_meta_param", lambda module, names: None)
        patch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", lambda allocation, device: buffer.bytes[: allocation[2]])
        patch.setattr(management, "NUM_STREAMS", 2)
        patch.setattr(management, "STREAMS", {torch.device("cpu"): [stream, stream]})
        patch.setattr(management, "STREAM_AIMDO_CAST_BUFFERS", {stream: buffer})
        patch.setattr(management, "current_stream", lambda device: stream)
        yield


def _lend_by_aimdo(module, state: str, buffer: _Buffer, patch: pytest.MonkeyPatch) -> None:
    kept = [module.weight, module.bias]
    size = _size(module)
    buffer.reserve(size)
    own = {"_v": (_Pages(state), 0, size), "_v_signature": None, "seed_key": "", "comfy_cast_weights": True}
    if state == "resident":
        own |= {
            "_v_signature": SIGNATURE,
            "_v_weight": kept[0].data,
            "_v_bias": None if kept[1] is None else kept[1].data,
        }
    else:
        pin = torch.empty(size, dtype=torch.uint8)
        for tensor, place in zip(kept, comfy.memory_management.interpret_gathered_like(kept, pin), strict=True):
            if tensor is not None:
                place.copy_(tensor)
        own["_pins"] = {"weights": {"pin": pin, "registered": True}}
    for name, value in (own | {"weight_lowvram_function": None, "bias_lowvram_function": None}).items():
        patch.setitem(module.__dict__, name, value)
    for name, tensor in zip(("weight", "bias"), kept, strict=True):
        if tensor is not None:
            patch.setitem(module._parameters, name, torch.nn.Parameter(tensor.to("meta"), requires_grad=False))


class _Pages:
    """Pages of VRAM that are there, or that there is no room for."""

    def __init__(self, state: str):
        self.signature = SIGNATURE if state == "resident" else None

    def fault(self, allocation, size: int) -> bytes | None:
        return self.signature

    def unpin(self, allocation, size: int) -> None:
        pass


class _Stream:
    def wait_stream(self, other) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


class _Buffer:
    """The buffer that weights are streamed through."""

    def __init__(self):
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        self.bytes = self.bytes if size <= len(self.bytes) else torch.empty(size, dtype=torch.uint8)

    def size(self) -> int:
        return len(self.bytes)

    def get(self, size: int, offset: int) -> tuple:
        return self, offset, size
