"""What a node shows of its result: a sentence, a table, the whole text. The page draws it, in its language."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

RESULT_KEY = "halfsafe_result"
GOOD, WARN, BAD = "good", "warn", "bad"
SAVED = "Saved {file}, {size}: {formats}."
UNLISTED = "Saved {file}, {size}: {formats}. No loader lists files there: begin the prefix with diffusion_models/."
FINITE = "Finite: no NaN and no Inf."
NOT_FINITE = "NaN or Inf in {names}."
CHOSEN = "{chosen} of {free} layers stand {candidate}: error about {error} ({snr})."
UNREACHED = "No layer may be in {candidate}: the target of {target} dB cannot be reached."
BEST = "Best: {weights}, {computed}. {seconds} s a step, {memory}, {close}."
BEST_SMALL = (
    "Best: {weights}, {computed}. {less} less memory, as fast within the spread: {seconds} s a step, {memory}, {close}."
)
CLOSEST = "No setting reaches {floor}. The closest: {weights}, {computed}. {seconds} s a step, {memory}, {close}."
AS_LOADED, HELD_IN = "weights as loaded", "weights in {0}"
SAME_AS_FP32, FROM_FP32 = "the same picture as fp32", "{0} away from fp32"
UNRANKED = "No setting stands out: the times were too noisy to rank. Run it again on a quiet machine."
NONE_WORKS = "No setting gave a finite result."
DEVICE = "{device} computes in {compute}. Faster in {fast}."
DEVICE_PLAIN = "{device} computes in {compute}. 8-bit weights save memory here, no time."
CALIBRATED = "Calibrated {layers} layers, for Save Model to round by."
HALVED = (
    "{file}: {before} (16 bit) -> {after}; {kept} of it kept in {formats}, "
    "because 8 bits lose too much there or cannot hold it: {reasons}."
)
LESS = "{file}: {before} (16 bit) -> {after}."
AS_IT_IS = "{file}: nothing is held in 8 bits: {reasons}."
MEMORY_LATER = (
    "Computes as balanced does: a loaded model keeps its {held}. "
    "Halve the memory, in the sidebar, loads them in {storage}, about {after}."
)
MEMORY_LESS = "Computes as balanced does: a loaded model keeps its {held}. {why}"
IDENTICAL = "Identical: no pixel differs."
HARD_TO_SEE = "The difference is hard to see: {psnr}."
VISIBLE = "The difference can be seen side by side: {psnr}."
PLAIN = "The pictures differ plainly: {psnr}."
SENTENCES = (
    SAVED, UNLISTED, FINITE, NOT_FINITE, CHOSEN, UNREACHED, BEST, BEST_SMALL, CLOSEST, UNRANKED, NONE_WORKS,
    DEVICE, DEVICE_PLAIN, CALIBRATED, HALVED, LESS, AS_IT_IS, MEMORY_LATER, MEMORY_LESS, IDENTICAL, HARD_TO_SEE,
    VISIBLE, PLAIN,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A node's result as the page shows it.

    Args:
        sentence: of ``SENTENCES``, filled in with ``values``.
        tone: good, warn or bad.
        head, rows: a table; ``marked``: the row that matters most, from 0. A cell beyond the head is its row's tooltip.
        text: all of it.
        toast: whether the page tells it as a message too.
        pictures: two files of ComfyUI's, drawn over each other with a slider.
    """

    sentence: str
    values: Mapping[str, str | int] = field(default_factory=dict)
    tone: str = GOOD
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marked: int | None = None
    text: str = ""
    toast: bool = False
    pictures: Sequence[Mapping] = ()

    def ui(self) -> dict[str, tuple[str]]:
        """Make a node's ui output of the result, with the text where other packs' viewers look."""
        return {"text": (self.text,), RESULT_KEY: (json.dumps(asdict(self), allow_nan=False),)}
