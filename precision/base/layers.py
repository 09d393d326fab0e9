"""Facts of a module: its kind of matrix product, and the data that its weight holds."""

import torch


def kind_of(module: torch.nn.Module) -> str | None:
    """Return ``linear``, ``conv`` or ``transposed``; None for a module without a matrix product."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    if isinstance(module, torch.nn.modules.conv._ConvTransposeNd):
        return "transposed"
    return "conv" if isinstance(module, torch.nn.modules.conv._ConvNd) else None


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the stored data of a quantized weight, then its scales; a tuple of any other tensor."""
    # comfy-kitchen's ``QuantizedTensor`` gives its layout, and that its plain tensors, the data first
    # (comfy_kitchen/tensor/base.py).
    layout = getattr(tensor, "layout_cls", None)
    return (tensor,) if layout is None else tuple(filter(torch.is_tensor, layout.get_plain_tensors(tensor)))
