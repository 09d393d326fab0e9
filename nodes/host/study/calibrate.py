"""Calibrate a model in ComfyUI: sum the products of its layers' inputs over a short run of its own
sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path

import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ....precision.base.errors import HalfsafeError
from ....precision.base.message import Message
from ....precision.base.patching import patched
from ....precision.base.text import size_text
from ....precision.devices.memory import require_memory
from ....precision.files.atomic_write import require_space
from ....precision.formats.comfy_format import can_be_quantized
from ....precision.make.calibration import WIDTHS, CalibrationData, Products, products_bytes
from ..comfyui.execution import is_on_several_devices
from ..comfyui.layer_forward import LayerForward
from ..comfyui.layers import matrix_layers
from ..comfyui.page import show_progress
from ..comfyui.weights import calling_layers
from ..load.devices import free_host_memory
from ..load.identity import source_of_model
from ..load.tensors import advancing
from .sampling import Inputs, bare_clone, sample, watch_sampling

STEPS = 8
MOST_MEMORY = 8 << 30


def calibrate_model(
    patcher: ModelPatcher, inputs: Inputs, previous: CalibrationData | None = None, path: str = ""
) -> CalibrationData:
    """Sample ``STEPS`` steps and sum the inputs of every quantizable layer. The model is not
    changed.

    ``previous``: of the same model; what it saw is added. ``path``: where it will be written, if
    anywhere.

    Raises:
        MemoryShortage: the sums do not fit into the host's memory.
        CheckpointError: they do not fit on the disk of ``path``.
        HalfsafeError: ``previous`` is of another model, the model is spread over several devices,
            or it was not called.
    """
    if is_on_several_devices(patcher):
        problem = "The model is spread over several devices."
        raise HalfsafeError(problem, "Calibrate on one device, before MultiGPU.")
    modules = {name: module for name, module in matrix_layers(patcher.model) if can_be_quantized(type(module).__name__)}
    columns = {name: module.in_features for name, module in modules.items()}
    source, cls = source_of_model(patcher), type(patcher.model).__name__
    if previous is not None:
        previous.require_model(source, str(source.get("file") or cls), columns)
    width = _width(columns, cls, WIDTHS if previous is None else (previous.width,))
    if path:
        require_space(Path(path), products_bytes(columns.values(), width) // 2)
    sums = {name: Products.empty(number, width) for name, number in columns.items()}
    sums |= previous.copied() if previous else {}
    calls = _sampled(patcher, modules, sums, inputs)
    if not calls:
        raise HalfsafeError("The model was not called, so nothing was calibrated.", "Connect a latent and a prompt.")
    runs, earlier = (previous.runs, previous.calls) if previous else (0, 0)
    return CalibrationData(source, cls, width, sums, runs + 1, earlier + calls)


def _width(columns: Mapping[str, int], cls: str, widths: Sequence[int]) -> int:
    """Choose the widest blocks whose sums take at most half of the free memory, and 8 GiB; else the
    narrowest."""
    free = free_host_memory()
    sizes = {width: products_bytes(columns.values(), width) for width in widths}
    width = next((width for width, size in sizes.items() if size <= min(free // 2, MOST_MEMORY)), widths[-1])
    what = Message("Calibrating {0}", cls)
    require_memory(sizes[width], what, free, "Free some memory: close other programs, unload models.")
    show_progress(Message("calibrating takes {0} sampler steps and {1} of memory", STEPS, size_text(sizes[width])))
    return width


def _sampled(
    patcher: ModelPatcher, modules: Mapping[str, torch.nn.Module], sums: Mapping[str, Products], inputs: Inputs
) -> int:
    """Run the sampler with every layer's inputs summed; return how many calls the model had."""
    steps, calls = count(1), count()
    bar = comfy.utils.ProgressBar(STEPS)
    advance = advancing(bar)
    clone = bare_clone(patcher)

    def step(executor, *args, **kwargs):
        advance()
        show_progress(Message("step {0} of {1}", min(next(steps), STEPS), STEPS))
        return executor(*args, **kwargs)

    @contextmanager
    def inside() -> Iterator[None]:
        next(calls)
        # A call with an argument that is not known is not summed: what the layer multiplies is not
        # known either.
        measuring = (
            LayerForward.on(module).with_fields(measure=partial(summed, sums[name])) for name, module in modules.items()
        )
        with patched(chain.from_iterable(measuring)), calling_layers(modules.values()):
            yield

    def summed(own: Products, forward: Callable, x: torch.Tensor, **kwargs) -> torch.Tensor:
        advance(0)
        own.add(x.dequantize() if isinstance(x, QuantizedTensor) else x)
        return forward(x, **kwargs)

    watch_sampling(clone, step, inside)
    sample(clone, inputs, STEPS)
    bar.update_absolute(STEPS)
    return next(calls)
