"""A model's calls on fake CUDA tensors: everything a CUDA device is asked to do, and nothing of what it answers.

Sees: which way the pack and ComfyUI go for device type ``cuda`` (``mm(out_dtype)`` instead of the CPU's fp32 products), every
operation with its dtypes, sizes and layout, every read by the host, and whether a graph breaks.
Does not see: numbers (a read is answered with ``answer``), time, real kernels, streams and offload, custom operators' own
products, and what ComfyUI decides by the device it was started on, here a CPU: attention is set to ``attention_pytorch``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

import torch
from support.cuda_rules import HostReads
from support.fake_tensors import fake_cuda_tensors
from support.families import Call, transformer_options
from support.leaf_operations import LeafOperations, aten
from torch.utils._pytree import tree_leaves, tree_map_only

NO_KERNEL = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
}


class FakeCuda:
    """A loaded ModelPatcher whose weights, and its LoRAs' beside them, are fake CUDA tensors inside of ``with``; ``call`` makes one call of it.

    ``reads``: of the last call; ``places`` the pack's, ``foreign`` how many others.
    """

    def __init__(self, patcher, answer: float = 1.0):
        self.patcher = patcher
        self.mode = fake_cuda_tensors()
        self.reads = AnsweredReads(answer)

    def __enter__(self) -> FakeCuda:
        import comfy.model_management

        comfy.model_management.load_models_gpu([self.patcher])
        self.patcher.pre_run()
        self._undo = ExitStack()
        self._undo.enter_context(attention_of_a_gpu())
        self._undo.callback(self.patcher.cleanup)
        for model in (self.patcher.model, *(other.model for other in self.patcher.model_patches_models())):
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    fakes = {name: self.fake(tensor) for name, tensor in tensors.items()}
                    self._undo.enter_context(mock.patch.dict(tensors, fakes))
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def call(self, call: Call) -> torch.Tensor:
        """The model's answer to a captured call; composite operations come in parts, as grad mode has them."""
        args, kwargs = tree_map_only(torch.Tensor, self.fake, (call.args, dict(call.kwargs)))
        names = ("c_concat", "c_crossattn", "control")
        arguments = {**dict(zip(names, args[2:], strict=False)), **kwargs}
        arguments["transformer_options"] = {
            **arguments.get("transformer_options", {}),
            **transformer_options(self.patcher),
        }
        self.reads.places, self.reads.foreign = [], 0
        with torch.inference_mode(False), torch.no_grad(), self.mode, self.reads:
            return self.patcher.model.apply_model(args[0], args[1], **arguments)

    def fake(self, tensor):
        """A fake CUDA tensor of the same dtype and layout; a quantized tensor is faked inside."""
        if tensor is None:
            return None
        if hasattr(tensor, "_qdata"):
            params = replace(tensor._params, scale=self.fake(tensor._params.scale))
            fake = type(tensor)(self.fake(tensor._qdata), tensor._layout_cls, params)
        else:
            with torch.inference_mode(False), self.mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter(fake, requires_grad=False) if is_parameter else fake


class AnsweredReads(HostReads):
    """Counts the reads of fake CUDA tensors, and answers each with the same number."""

    def __init__(self, answer: float):
        super().__init__()
        self.answer = answer
        self.foreign = 0

    def _watched(self, read: Callable) -> Callable:
        @functools.wraps(read)
        def call(tensor, *args, **kwargs):
            if not torch.is_tensor(tensor) or tensor.device.type != "cuda":
                return read(tensor, *args, **kwargs)
            self.note(read.__name__)
            return _answer(read.__name__, tensor, self.answer)

        return call

    def note(self, what: str) -> None:
        before = len(self.places)
        super().note(what)
        self.foreign += len(self.places) == before


def _answer(name: str, tensor: torch.Tensor, number: float):
    if name == "tolist":
        return functools.reduce(lambda value, size: [value] * size, reversed(tensor.shape), number)
    if name in ("cpu", "numpy"):
        return torch.full(tensor.shape, number, dtype=tensor.dtype, device="cpu")
    kind = {"__bool__": bool, "__int__": int, "__index__": int}.get(name, float)
    return kind(number)


@contextlib.contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Every model's attention is ``attention_pytorch``; the CPU's default asks for free memory and computes in parts."""
    import comfy.ops
    from comfy.ldm.modules import attention

    names = ("optimized_attention", "optimized_attention_masked")
    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(comfy.ops, "scaled_dot_product_attention", fused_attention))
        for name, module in list(sys.modules.items()):
            for function in names if name.startswith("comfy.ldm") else ():
                if hasattr(module, function):
                    undo.enter_context(mock.patch.object(module, function, attention.attention_pytorch))
        yield


def fused_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options) -> torch.Tensor:
    """The kernel CUDA takes: fake tensors would be given the composite one."""
    if q.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, False, dropout_p, is_causal, scale=scale)[0]


@dataclass(frozen=True)
class Kernel:
    """One launch: the operation and the bytes of its operands and results."""

    name: str
    read: int
    written: int


class Kernels(LeafOperations):
    """Lists every operation that launches a kernel. One operation counts as one kernel, however many a library takes."""

    def __init__(self):
        super().__init__()
        self.seen: list[Kernel] = []

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if not func.is_view and func not in NO_KERNEL and not func.name().startswith("prim::"):
            self.seen.append(Kernel(func.name().removeprefix("aten::"), _bytes((args, kwargs)), _bytes(result)))
        return result


def _bytes(values) -> int:
    return sum(
        leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"
    )
