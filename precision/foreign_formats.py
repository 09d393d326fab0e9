"""Quantization formats of other tools, which neither ComfyUI nor this package reads, told by their tensor names."""

from collections.abc import Iterable

from .errors import CheckpointError

_ORIGINAL = "Use the 16-bit or fp8 version of this model."
_FORMATS = (
    (("wscales", "smooth_factor", "proj_down"), "a Nunchaku (SVDQuant) file", "Load it with the ComfyUI-nunchaku nodes."),
    (("absmax", "quant_map", "nested_absmax", "SCB"), "a bitsandbytes file", "Load it with a bitsandbytes loader node."),
    (("svd_up", "svd_down", "zero_point"), "an SDNQ file", f"It runs in SD.Next. {_ORIGINAL}"),
    (("weight_packed", "weight_global_scale"), "a compressed-tensors file", f"It runs in vLLM. {_ORIGINAL}"),
    (("_data", "_scale"), "an optimum-quanto file", _ORIGINAL),
    (("weight_qdata", "_weight_qdata"), "a torchao file", _ORIGINAL),
    (("float8_data",), "a flux-fp8-api file", _ORIGINAL),
    (("W_q",), "an HQQ file", _ORIGINAL),
    (("qweight", "qzeros"), "a GPTQ or AWQ file", _ORIGINAL),
)
_FORMAT_OF = {leaf: (tool, advice) for leaves, tool, advice in _FORMATS for leaf in leaves}


def reject_foreign(names: Iterable[str], path) -> None:
    """Raise CheckpointError, naming the tool and what to use, if a tensor name belongs to a foreign format."""
    for name in names:
        if ".quant_state.bitsandbytes" in name:
            raise CheckpointError(path, "a bitsandbytes file", name, "Load it with a bitsandbytes loader node.")
        found = _FORMAT_OF.get(name.rpartition(".")[2])
        if found:
            raise CheckpointError(path, found[0], name, found[1])
