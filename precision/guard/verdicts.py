"""Name the verdicts of a run, and what to try after each."""

from ..base.errors import HalfsafeError

CLEAN = "clean"
RECOVERED = "recovered"
STOPPED = "stopped"
BAD_WEIGHTS = "bad_weights"
BAD_INPUT = "bad_input"
NOT_PRECISION = "not_precision"
DEVICE_FAULT = "device_fault"

CURED = (CLEAN, RECOVERED)
ADVICE = {
    RECOVERED: (
        "NaN and Inf are cured; whether other values are right was not looked at, unless check is on. "
        "Rules in the report of a Halfsafe or Precision Report node make the next run start that way."
    ),
    STOPPED: (
        "Set on_nan, or the setting Guard every run, to retry_higher, or put Compute Dtype with fp16_safe (or bf16, "
        "where the device has it) before the sampler."
    ),
    BAD_WEIGHTS: "Get the file again or leave it out: no precision repairs a weight that is NaN or Inf.",
    BAD_INPUT: "Look at the node that made it; Check Finite behind that node names the first one that is not finite.",
    NOT_PRECISION: "No dtype cures this: try another sampler or scheduler, more steps, a lower cfg.",
    DEVICE_FAULT: (
        "The device or its driver gave a wrong result, not the model: try another driver or torch, "
        "--disable-dynamic-vram, --disable-async-offload, or a device that is not overclocked."
    ),
}


class NonFinite(HalfsafeError):
    """A model, VAE or text encoder gave NaN or Inf, and the run was stopped.

    Args:
        verdict: of the report's verdicts.
    """

    def __init__(self, problem: str, verdict: str = STOPPED, advice: str = ""):
        super().__init__(" ".join((problem, f"Verdict: {verdict}.")), advice or ADVICE[verdict])
        self.verdict = verdict


def asks_for_action(verdict: str) -> bool:
    """Tell whether a verdict leaves something for the user to do."""
    return verdict != RECOVERED
