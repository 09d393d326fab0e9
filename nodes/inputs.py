"""Inputs that several nodes have, their category, and the socket type of rules."""

from comfy_api.latest import io

from ..precision.base.errors import HalfsafeError
from ..precision.base.message import Message
from ..precision.base.options import COMPUTE_OPTIONS, STORAGE_OPTIONS
from ..precision.check.drift import CHECKS
from ..precision.guard.policy import ON_NAN
from ..precision.make.calibration import CalibrationData
from ..precision.plan.rules import Rules

CATEGORY = "precision"
LOAD, GUARD, MEASURE, EXPERT = (f"{CATEGORY}/{name}" for name in ("load", "guard", "measure", "expert"))
RulesType = io.Custom("HALFSAFE_RULES")
CalibrationType = io.Custom("HALFSAFE_CALIBRATION")
STORAGE_TOOLTIP = (
    "auto: as in the file, 8 bit if 16 does not fit. fp8, int8: half the memory. w4a8: ComfyUI 0.31, w6a8: 0.38. "
    "nvfp4, mxfp8: RTX 50. Sensitive layers stay 16 bit."
)
COMPUTE_TOOLTIP = (
    "The dtype of the matrix products. auto: fast and safe on this device. fp16_safe: fp16 that cannot overflow. fp8: "
    "RTX 40/50, Hopper, RX 9000."
)
RULES_TOOLTIP = "Exceptions per layer, from Layer Rules. If not connected, the preset 'keep sensitive layers' applies."

ON_NAN_TOOLTIP = (
    "On NaN or Inf: retry_higher repeats the failed call in a higher precision; stop ends the run with the reason; "
    "report only shows it."
)
GUARD_OFF = " off: no guard."
CHECK_TOOLTIP = (
    "Also compares steps with fp32, one extra call each. Skipped beside nodes that may keep state between steps."
)


def storage_input(name: str = "storage", tooltip: str = STORAGE_TOOLTIP, default: str = "auto") -> io.Combo.Input:
    return io.Combo.Input(name, options=list(STORAGE_OPTIONS), default=default, tooltip=tooltip)


def compute_input() -> io.Combo.Input:
    return io.Combo.Input("compute", options=list(COMPUTE_OPTIONS), default="auto", tooltip=COMPUTE_TOOLTIP)


def rules_input() -> io.Input:
    return RulesType.Input("rules", optional=True, tooltip=RULES_TOOLTIP)


def on_nan_input(name: str = "on_nan", options: tuple[str, ...] = ON_NAN, optional: bool = False) -> io.Combo.Input:
    """Make the input that says what a guard does; options of its own are described by ``GUARD_OFF``."""
    tooltip = ON_NAN_TOOLTIP + (GUARD_OFF if options != ON_NAN else "")
    return io.Combo.Input(name, options=list(options), default="retry_higher", optional=optional, tooltip=tooltip)


def seed_input(tooltip: str) -> io.Int.Input:
    return io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=False, tooltip=tooltip)


def check_input() -> io.Combo.Input:
    return io.Combo.Input("check", options=list(CHECKS), default="off", optional=True, tooltip=CHECK_TOOLTIP)


def node_id_of(cls: type[io.ComfyNode]) -> str | None:
    """Return the id of the node that is executed; None outside of a prompt."""
    return cls.hidden.unique_id if cls.hidden else None


def checked_rules(rules: object, name: str = "rules") -> Rules | None:
    """Return the value of an input of rules; None if nothing is connected."""
    given = type(rules).__name__
    problem = Message("The input '{0}' takes the output of Layer Rules (Halfsafe), not a {1}.", name, given)
    return _checked(rules, Rules, problem, "Connect a Layer Rules node and write the rules into its text box.")


def checked_calibration(calibration: object) -> CalibrationData | None:
    """Return the value of an input of a calibration; None if nothing is connected."""
    problem = Message("This takes the output of Calibrate (Halfsafe), not a {0}.", type(calibration).__name__)
    advice = "Connect a Calibrate node; a saved calibration file is for convert --calibration."
    return _checked(calibration, CalibrationData, problem, advice)


def _checked(value, cls: type, problem: str, advice: str):
    """Return a value of a socket of ours, or raise: ComfyUI's API lets other types through."""
    if value is None or isinstance(value, cls):
        return value
    raise HalfsafeError(problem, advice)
