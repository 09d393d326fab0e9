"""Inputs that several nodes have, their category, and the socket type of rules."""

from comfy_api.latest import io

from ..precision.dtypes import COMPUTE_OPTIONS, STORAGE_OPTIONS
from ..precision.errors import HalfsafeError
from ..precision.plan.rules import Rules

CATEGORY = "precision"
RulesType = io.Custom("HALFSAFE_RULES")
STORAGE_TOOLTIP = (
    "How weights are kept in memory. auto: as in the file; where 16 bit does not fit the GPU, "
    "int8 if this GPU is faster with it, else fp8_e4m3fn. fp8 and int8 halve the memory of 16 bit; int8 is closer "
    "to the original and takes longer to make. Norms, embeddings and other sensitive layers stay high (see rules)."
)
COMPUTE_TOOLTIP = (
    "The dtype of the maths. auto: bf16 where it is native and the model prefers it, else fp16_safe; "
    "bf16 on AMD, Intel and Apple M3; fp32 where fp16 is slow. None of them can overflow. fp16_safe: "
    "fp16 products with an fp32 stream. fp8 needs fp8 matmul units (RTX 40/50, Hopper, RX 9000); "
    "elsewhere it has no effect, and the report says so. int8: a diffusion model's int8 weights multiply in int8, "
    "a scale per token, the rest as with auto. auto and fp8 do the same; any other choice dequantizes them."
)
RULES_TOOLTIP = (
    "Exceptions per layer, from Halfsafe Layer Rules. Without it the preset 'keep sensitive layers' applies."
)


def storage_input(name: str = "storage", tooltip: str = STORAGE_TOOLTIP, default: str = "auto") -> io.Combo.Input:
    return io.Combo.Input(name, options=list(STORAGE_OPTIONS), default=default, tooltip=tooltip)


def compute_input() -> io.Combo.Input:
    return io.Combo.Input("compute", options=list(COMPUTE_OPTIONS), default="auto", tooltip=COMPUTE_TOOLTIP)


def rules_input() -> io.Input:
    return RulesType.Input("rules", optional=True, tooltip=RULES_TOOLTIP)


def checked_rules(rules: object, name: str = "rules") -> Rules | None:
    """Return what an input of rules was given; None where nothing is connected.

    Raises:
        HalfsafeError: it is of another type, which ComfyUI's API lets through.
    """
    if rules is not None and not isinstance(rules, Rules):
        problem = f"The input '{name}' takes the output of Layer Rules (Halfsafe), not a {type(rules).__name__}."
        raise HalfsafeError(problem, "Connect that node to it; lines of rules go into its own text.")
    return rules
