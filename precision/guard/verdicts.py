"""The verdicts of a run, the advice for each, and the sentences of their evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..base.errors import HalfsafeError
from ..report.schema import Verdict

CLEAN: Final = "clean"
RECOVERED: Final = "recovered"
STOPPED: Final = "stopped"
BAD_WEIGHTS: Final = "bad_weights"
BAD_INPUT: Final = "bad_input"
NOT_PRECISION: Final = "not_precision"
DEVICE_FAULT: Final = "device_fault"

CURED = (CLEAN, RECOVERED)
ADVICE: dict[Verdict, str] = {
    RECOVERED: (
        "No NaN and no Inf is left. To keep this after a restart, click Keep for next run on the Halfsafe node, "
        "whose check also finds wrong numbers that are not NaN."
    ),
    STOPPED: "Set the guard to retry_higher: it repeats what fails in a higher precision.",
    BAD_WEIGHTS: "Leave the file out or download it again, as no precision repairs a weight that is NaN or Inf.",
    BAD_INPUT: "Look at the node that made it; Check Finite behind that node names the first one that is not finite.",
    NOT_PRECISION: (
        "No higher precision cures this: try another sampler or scheduler, more steps, a lower cfg, the model without "
        "what other nodes put on it, and Compute Dtype with a lower dtype, as a device's fp32 may be at fault."
    ),
    DEVICE_FAULT: (
        "The device or its driver gave a wrong result, not the model: try another driver or torch, "
        "--disable-dynamic-vram, --disable-async-offload, or a device that is not overclocked."
    ),
}

NAN_GIVEN = "It holds NaN, and what is computed of NaN is NaN in every precision."
BETWEEN_CALLS = (
    "The model's results were finite: it arose between its calls, in the sampler, "
    "the guidance (cfg) or a patch of either."
)
STARTED_AGAIN = "The sampling was started again in {}, as {} may keep state between steps."
SAME_AGAIN = "The same call, in the same arithmetic and with the same random numbers, is finite."
EAGER_IS_FINITE = "The compiled call is NaN or Inf each time; without torch.compile it is finite."
PATCH_READ = "The first operation whose result is NaN or Inf reads this patch."
NAN_READ = "The weight itself is NaN."
WEIGHTS_MADE_FINITE = "In fp32 the call is NaN or Inf too, and finite with a zero for each NaN and Inf of the weights."
FAILS_IN_FP32 = "In fp32 the call is NaN or Inf too."
WRONG_IN_FP32 = "A test product in fp32 is wrong."

STAYS_LOW = "{0} computes in a dtype of its own, which Halfsafe does not change."
STAYS_LOW_OF = "{0} is made by {1} and computes in a dtype of its own, which Halfsafe does not change."
OF_ITS_OWN = (
    "Choose bf16 or fp32 where it is loaded, or leave its node out: its fp16 is what no setting of Halfsafe reaches."
)
UNPACKED = (
    "Its quantized weights were dequantized before each product, so the device's product of 8 bits is at fault: "
    "load it with Load VAE (Halfsafe), which unpacks it, or take its 16-bit file."
)
NO_CHOICE = "The text encoder is to choose a token by numbers that are NaN or Inf."
WAS_FINITE = "An earlier input, with which the result was finite, gives NaN or Inf now."
BROKEN_OFF = "Its repeat ended with an error, and the first result is given back: {0}"

MAY_BE_KEPT = "In fp32 the repeated call is NaN or Inf too, or was given a result that was kept of the failed one."
LEAVE_OUT = "The sampling could not start again beside {}: leave its node out, or let it begin after this step."
GOES_ON = "The model goes on in fp16_safe as long as it is loaded."
SAME_SEED = "Until a restart later runs begin that way, so the same seed may give a slightly different picture."
BEGAN_WITH = "Began wider, as an earlier run showed: {parts}."
BEGAN_WIDER = (
    "Nothing to do. This run began in the higher precision that an earlier run needed, which the rules in the report "
    "repeat: without it NaN or Inf may come again."
)
BEGINS_SAFE = "Nothing to do. With Compute Dtype at fp16_safe it begins that way, and no call is repeated."

CONTROL_ADVICE = (
    "Load the ControlNet with compute fp32 or fp16_safe in Load ControlNet (Halfsafe), lower its strength, "
    "or look at its picture with Check Finite. If its file holds NaN, download it again."
)
COMPILED = (
    "torch.compile runs this model, and without it the same call is finite: leave the compile node out, "
    "or compile with another backend. Otherwise it is the device or its driver."
)
EMBEDDING = "A textual inversion embedding in the prompt holds NaN or Inf: leave it out or download it again."
ENCODER_INPUTS = {
    "VAE decode": (
        "latent",
        "It was so before the VAE: see what NaN Guard on the model says, or put one there; "
        "or Check Finite behind the node that made it.",
    ),
    "VAE encode": ("image", "It was so before the VAE: put Check Finite behind the node that made it."),
    "Text encoder encode": ("tokens", EMBEDDING),
    "Text encoder generate": ("tokens", EMBEDDING),
}
"""What a VAE or text encoder does -> (what it was given, what to do where that is not finite)."""


class NonFinite(HalfsafeError):
    """A model, VAE or text encoder returned NaN or Inf, and the run was stopped."""

    def __init__(self, problem: str, verdict: Verdict = STOPPED, advice: str = ""):
        found, cure = " ".join((problem, f"Verdict: {verdict}.")), advice or ADVICE[verdict]
        if verdict == BAD_WEIGHTS:  # whose advice names the file
            found, cure = cure, found
        super().__init__(found, cure)
        self.verdict = verdict


@dataclass(frozen=True)
class Wording:
    """The sentences that differ between kinds of call. ``advice``: verdict -> advice that replaces that of
    ``ADVICE``."""

    no_memory: str
    broken_off: str
    input_made_finite: str = (
        "In fp32 the call is NaN or Inf with it, and finite with a zero for each of its NaN and Inf."
    )
    advice: Mapping[Verdict, str] = field(default_factory=dict)


MODEL = Wording(
    "There was not enough memory to repeat it in a higher precision: put Compute Dtype with fp16_safe "
    "(or bf16, where the device has it) before the sampler, or take a smaller picture or batch.",
    "Put Compute Dtype with fp16_safe (or bf16, where the device has it) before the sampler, "
    "or leave out what other nodes put on the model.",
)


def encoder_wording(kind: str, without_cure: str, without_retries: str) -> Wording:
    """Return the sentences for a VAE or text encoder, named ``kind``.

    ``without_cure``: advice if no precision helps. ``without_retries``: what to do instead of a repeat."""
    advice: dict[Verdict, str] = {
        RECOVERED: "",
        NOT_PRECISION: f"No higher precision cures this {kind}: {without_cure}.",
        DEVICE_FAULT: f"{ADVICE[DEVICE_FAULT]} Or run the {kind} on the CPU.",
        STOPPED: f"Set the guard to retry_higher, or {without_retries}.",
    }
    return Wording(
        f"There was not enough memory to repeat it in a higher precision: {without_retries}, "
        "or take a smaller picture or batch.",
        f"Instead, {without_retries}.",
        input_made_finite=(
            "In fp32 the result is NaN or Inf with it, and finite with a zero for each of its NaN and Inf."
        ),
        advice=advice,
    )


ENCODERS = {
    "VAE": encoder_wording(
        "VAE",
        "try another file, another tile size, or its decode on the CPU",
        "load the VAE with dtype bf16 or fp32",
    ),
    "Text encoder": encoder_wording(
        "Text encoder",
        "try another file, leave LoRAs and embeddings out one by one, or run it on the CPU (device cpu of Load CLIP)",
        "look for the node or pack that runs it in fp16: by itself ComfyUI runs it with fp32 activations",
    ),
}
