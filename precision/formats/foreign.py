"""Quantization formats of other tools, which neither ComfyUI nor this package reads,
recognised by their tensor names."""

from collections.abc import Iterable

from ..errors import CheckpointError

_ORIGINAL = "Use the 16-bit or fp8 version of this model."
_FORMATS = (
    (
        ("wscales", "smooth_factor", "proj_down"),
        "a Nunchaku (SVDQuant) file",
        "Load it with the ComfyUI-nunchaku nodes.",
    ),
    (
        ("absmax", "quant_map", "bitsandbytes__nf4", "SCB"),
        "a bitsandbytes file",
        "Load it with a bitsandbytes loader node.",
    ),
    (("svd_up", "svd_down", "zero_point"), "an SDNQ file", f"It runs in SD.Next. {_ORIGINAL}"),
    (("weight_packed", "weight_global_scale"), "a compressed-tensors file", f"It runs in vLLM. {_ORIGINAL}"),
    (("_data", "_scale"), "an optimum-quanto file", _ORIGINAL),
    (("weight_qdata", "_weight_qdata"), "a torchao file", _ORIGINAL),
    (("float8_data",), "a flux-fp8-api file", _ORIGINAL),
    (("W_q",), "an HQQ file", _ORIGINAL),
    (("qweight", "qzeros"), "a GPTQ or AWQ file", _ORIGINAL),
)


def reject_foreign(names: Iterable[str], path) -> None:
    """Raise CheckpointError, naming the tool and what to use, if a tensor name belongs to a foreign format."""
    example = {name.rpartition(".")[2]: name for name in names}
    for leaves, tool, advice in _FORMATS:
        leaf = next((leaf for leaf in leaves if leaf in example), None)
        if leaf is not None:
            raise CheckpointError(path, tool, example[leaf], advice)
