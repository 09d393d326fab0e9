"""The verdicts of a run, the advice for each, and the sentences of their evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..base.errors import HalfsafeError
from ..base.message import Message, joined
from ..report.schema import Verdict

NOTHING_FOUND, REPAIRED, UNEXPLAINED, EXPLAINED = range(4)
"""The ranks of verdicts: each one of a higher rank is worse."""


class _Row(NamedTuple):
    """What is decided by a verdict, and what is said of it.

    Args:
        rank: how much is wrong, from ``NOTHING_FOUND`` to ``EXPLAINED``, which names a cause.
        tone: the colour of the verdict in the page: good, warn or bad.
        cause: the verdict in a few words, for headlines.
        cure: one short line where ``advice`` is long.
        advice: what to do, with the fields of :class:`Place`.
        of_input: the call was given NaN, so another guard may have told its cause.
        of_device: the device is at fault, and no layer.
        names_file: the advice names the file, so an error begins with it.
    """

    rank: int
    tone: Literal["good", "warn", "bad"]
    cause: str
    cure: str
    advice: str
    of_input: bool = False
    of_device: bool = False
    names_file: bool = False

    @property
    def cured(self) -> bool:
        """True if no NaN or Inf is left."""
        return self.rank <= REPAIRED

    @property
    def repaired(self) -> bool:
        """True if there was NaN or Inf and none is left."""
        return self.rank == REPAIRED

    @property
    def unexplained(self) -> bool:
        """True if NaN or Inf is left and its cause is not known."""
        return self.rank == UNEXPLAINED

    def shown(self) -> dict[str, str | bool]:
        """Return what the page decides by, and what it says of the verdict."""
        return {
            "tone": self.tone, "repaired": self.repaired, "unexplained": self.unexplained,
            "of_input": self.of_input, "cause": self.cause,
        }  # fmt: skip


VERDICTS: dict[Verdict, _Row] = {
    "clean": _Row(NOTHING_FOUND, "good", "No NaN left", "", ""),
    "recovered": _Row(REPAIRED, "warn", "Black image prevented", "", "No NaN or Inf is left. {keep}"),
    "stopped": _Row(
        UNEXPLAINED,
        "bad",
        "NaN or Inf found",
        "",
        "Set {switch} to retry_higher: it repeats a failed call in a higher precision.",
    ),
    "bad_weights": _Row(
        EXPLAINED,
        "bad",
        "A weight is NaN",
        "",
        joined(["Remove the file or download it again.", "No precision repairs a weight that is NaN or Inf."]),
        names_file=True,
    ),
    "bad_input": _Row(
        EXPLAINED,
        "bad",
        "The model was given NaN or Inf",
        "Check the node that made it.",
        "Check the node that made this input; Check Finite after it shows where the NaN begins.",
        of_input=True,
    ),
    "not_precision": _Row(
        EXPLAINED,
        "bad",
        "NaN or Inf that no precision cures",
        "Try another sampler, more steps or a lower cfg.",
        "No higher precision cures this: try another sampler or scheduler, more steps, a lower cfg, or no patches of "
        "other nodes. Also try a lower dtype in Compute Dtype, because the device's fp32 may be at fault.",
    ),
    "device_fault": _Row(
        EXPLAINED,
        "bad",
        "The device calculates wrongly",
        "Try another driver or torch.",
        "The device or its driver gave a wrong result, not the model: try another driver or torch, "
        "--disable-dynamic-vram, --disable-async-offload, or a device that is not overclocked.",
        of_device=True,
    ),
}
"""Every verdict, with all that is decided by it: other files ask the row and compare no name."""


class Place(NamedTuple):
    """Where a user finds a guard, in the words on the screen.

    Args:
        switch: the setting that says what the guard does.
        keep: how the rules that the guard found outlive a restart.
    """

    switch: str
    keep: str

    def worded(self, advice: str) -> str:
        """Return advice that names this place."""
        return advice if isinstance(advice, Message) else Message(advice, **self._asdict())


ANY_GUARD = Place("the guard", "")
NAN_GUARD = Place(
    "on_nan",
    "To keep this after a restart, click Copy as rules on a Precision Report, and paste them into a Layer Rules node.",
)
ONE_NODE = Place("guard", "To keep this after a restart, click Keep for next run on the Halfsafe node.")
EVERY_RUN = Place(
    "Guard every run",
    "To keep this after a restart, click Guard this workflow, and after the next run Keep for next run on its node.",
)

BETWEEN_CALLS = (
    "Every result of the model was finite: the NaN or Inf arose between its calls, in the sampler, in the guidance "
    "(cfg) or in a patch of either."
)
STARTED_AGAIN = "The sampling was restarted in {0}, because {1} may keep state between steps."
SAME_AGAIN = "A repeat of the call, in the same arithmetic and with the same random numbers, is finite."
NOT_HIDDEN_AGAIN = (
    "The model's own code replaced NaN or Inf in this call, and meets none in a repeat with the same arithmetic and "
    "random numbers."
)
EAGER_IS_FINITE = "The compiled call is NaN or Inf each time; without torch.compile it is finite."
PATCH_READ = "The first operation that returned NaN or Inf uses this patch."
NAN_READ = "The weight itself is NaN."
NAN_REPLACED = "An operation returned NaN because of this weight, and the code that runs with the model replaced it."
READ_BY_NONE = "Weights hold NaN, and the first call of the run read none of it, so they are not at fault in that call."
NOT_SEARCHED = "Weights hold NaN, and max_retries leaves no repeat to tell whether a call reads it: increase it."
NAN_CHANGES_NOTHING = (
    "A conditioning holds NaN, and a zero in place of it gives the same result, so it is not at fault."
)
WEIGHTS_MADE_FINITE = "In fp32 the call is NaN or Inf, but finite if each NaN and Inf in the weights is set to 0."
INPUT_MADE_FINITE = "In fp32 the result is NaN or Inf with this input, but finite if its NaN and Inf are set to 0."
FINITE_HERE = "The call is finite, but NaN or Inf in fp32: model code or a kernel hides it in this arithmetic."
FAILS_IN_FP32 = "In fp32 the call is NaN or Inf too."
WRONG_IN_FP32 = "A test operation in fp32 is wrong."

STAYS_LOW = "{0} computes in its own dtype, which Halfsafe does not change."
STAYS_LOW_OF = "{0} is created by {1} and computes in its own dtype, which Halfsafe does not change."
OF_ITS_OWN = "Choose bf16 or fp32 in its loader, or remove its node: no setting of Halfsafe changes its dtype."
UNPACKED = (
    "With its quantized weights dequantized before each product the result is finite, so the device's 8-bit product "
    "is at fault: load it with Load VAE (Halfsafe), which unpacks it, or use its 16-bit file."
)
NO_MEMORY = "Not enough memory to repeat this in a higher precision: {0}, or use a smaller picture or batch."
NO_CHOICE = "The text encoder cannot choose a token, because its scores are NaN or Inf."
BROKEN_OFF = "The repeat raised an error, so the first result is returned: {0}"

ENDED_IN = "The run ended in an error, and no precision that it chose is kept ({0})."
INTERRUPTED = "The run was interrupted, and no precision that it chose is kept."
NO_RESULT = "The run ended in an error before its result, so there is no verdict on it ({0})."
OTHERWISE = (
    "Choose bf16 or fp32 in Compute Dtype or in the model's loader, or remove patches of other nodes from the model."
)
IN_VAIN = "The model's fallback, fp16_safe, did not cure this call, so NaN or Inf is in the result."
UNGUARDED = "Add NaN Guard to the model: it repeats a failed call in a higher precision, and names the cause."
MAY_BE_KEPT = "The retry in fp32 is NaN or Inf as well, or it was fed a value cached from the failed call."
LEAVE_OUT = "The sampling could not restart because of {0}: remove its node, or let it start after this step."
GOES_ON = "The model uses fp16_safe until it is unloaded."
SAME_SEED = (
    "Until a restart later runs start in that precision, so the same seed may give a slightly different picture."
)
BEGAN_WITH = "Started as the last repair ended, with these in a higher precision: {parts}."
BEGAN_WIDER = (
    "Nothing to do. This run started in the higher precision that an earlier run needed; the rules in the report keep "
    "it. Without it NaN or Inf may return."
)
BEGINS_SAFE = "Nothing to do. With Compute Dtype set to fp16_safe the model starts that way, and no call is repeated."

CONTROL_ADVICE = (
    "Load the ControlNet with compute fp32 or fp16_safe in Load ControlNet (Halfsafe), lower its strength, or check "
    "its input picture with Check Finite. If its file holds NaN, download it again."
)
COMPILED = (
    "Without torch.compile the same call is finite: remove the compile node, or compile with another backend. If that "
    "does not help, the device or its driver is at fault."
)
EMBEDDING = "A textual inversion embedding in the prompt holds NaN or Inf: leave it out or download it again."
MADE_BEFORE = "The image held NaN before the VAE: add Check Finite after the node that made it."
NOT_CURED = "No higher precision cures this {0}: {1}."
OR_ON_CPU = "{0} Or run the {1} on the CPU."
ENCODER_INPUTS = {
    "VAE decode": (
        "latent",
        "The NaN was made before the VAE, mostly by the model: guard the model.",
    ),
    "VAE encode": ("image", MADE_BEFORE),
    "Text encoder encode": ("tokens", EMBEDDING),
    "Text encoder generate": ("tokens", EMBEDDING),
}
"""What a VAE or text encoder does -> (what it was given, what to do where that is not finite)."""


class NonFinite(HalfsafeError):
    """A model, VAE or text encoder returned NaN or Inf, and the run was stopped."""

    def __init__(self, problem: str, verdict: Verdict = "stopped", advice: str = ""):
        found = joined([problem, Message("Verdict: {0}.", verdict)])
        cure = advice or ANY_GUARD.worded(VERDICTS[verdict].advice)
        if VERDICTS[verdict].names_file:
            found, cure = cure, found
        super().__init__(found, cure)
        self.verdict = verdict


@dataclass(frozen=True)
class Wording:
    """The sentences that differ between kinds of call. ``advice``: verdict -> advice that replaces
    that of ``VERDICTS``."""

    no_memory: str
    broken_off: str
    advice: Mapping[Verdict, str] = field(default_factory=dict)


MODEL = Wording(
    "Not enough memory to repeat this in a higher precision: add Compute Dtype with fp16_safe (or bf16, if the "
    "device supports it) before the sampler, or use a smaller picture or batch.",
    "Add Compute Dtype with fp16_safe (or bf16, if the device supports it) before the sampler, or remove patches of "
    "other nodes from the model.",
)


def _encoder_wording(kind: str, without_cure: str, without_retries: str, stopped: str) -> Wording:
    """Return the sentences for a VAE or text encoder, named ``kind``.

    ``without_cure``: advice if no precision helps. ``without_retries``: what to do instead of a
    repeat. ``stopped``: advice if the guard repeats nothing."""
    advice: dict[Verdict, str] = {
        "recovered": "",
        "not_precision": Message(NOT_CURED, kind, without_cure),
        "device_fault": Message(OR_ON_CPU, VERDICTS["device_fault"].advice, kind),
        "stopped": stopped,
    }
    return Wording(
        Message(NO_MEMORY, without_retries),
        Message("Instead, {0}.", without_retries),
        advice,
    )


ENCODERS = {
    "VAE": _encoder_wording(
        "VAE",
        "try another file, another tile size, or decode on the CPU",
        "load the VAE with dtype bf16 or fp32",
        "Set {switch} to retry_higher, or load the VAE with dtype bf16 or fp32.",
    ),
    "Text encoder": _encoder_wording(
        "Text encoder",
        "try another file, remove LoRAs and embeddings one by one, or run it on the CPU (device = cpu in Load CLIP)",
        "find the node or pack that runs it in fp16 (ComfyUI itself uses fp32 activations)",
        "Set {switch} to retry_higher, or find the node or pack that runs it in fp16 (ComfyUI itself uses fp32 "
        "activations).",
    ),
}

_LONG = (
    UNGUARDED,
    LEAVE_OUT,
    OF_ITS_OWN,
    UNPACKED,
    OTHERWISE,
    CONTROL_ADVICE,
    NO_MEMORY,
    MODEL.no_memory,
    MODEL.broken_off,
)
LINES: Mapping[str, str] = {
    **dict.fromkeys(_LONG, ""),
    **{row.advice: row.cure for row in VERDICTS.values() if row.cure},
    MADE_BEFORE: "Check the node that made it.",
    EMBEDDING: "Leave the embedding out or download it again.",
    NOT_CURED: "Try another file, or run it on the CPU.",
    OR_ON_CPU: "Try another driver or torch.",
    COMPILED: "Remove the compile node, or compile with another backend.",
}
"""The template of advice that is longer than a line -> a line in its place, "" for none. Of other
advice the page shows the first sentence."""
