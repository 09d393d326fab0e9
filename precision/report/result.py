"""What a node shows of its result: a sentence, a table, the whole text. The page draws it, in its
language."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ..base.message import messages_in

RESULT_KEY = "halfsafe_result"
GOOD, WARN, BAD = "good", "warn", "bad"
SAVED, SAVED_LARGER = "Saved {file}, {size}.", "Saved {file}, {size}, larger than the model's file was: {before}."
HOLDS = "It holds {formats}."
UNLISTED = "No loader lists files there: begin the prefix with diffusion_models/."
CARD_WRITTEN = "Its model card is {card}."
CARD_LEFT = "{card} exists and was left as it is: it may describe another file."
CARD_UNWRITTEN = "The file is complete, its model card could not be written: {why}"
FINITE = "Finite: no NaN and no Inf."
NOT_FINITE = "NaN or Inf in {names}."
CHOSEN = "{chosen} of {free} layers can use {candidate}: error about {error} ({snr})."
UNREACHED = "No layer can be in {candidate} at the target of {target} dB."
BEST, CLOSEST, IS_CLOSEST = "Best: {name}.", "No setting has an error of {floor} or less.", "The closest: {name}."
FIGURES = "{time}, {memory}, {close}."
A_STEP, A_STEP_BESIDE = "{0} s a step", "{0} s a step ({1} {2})"
COMPUTED_IN = "{0}, computed in {1}"
ERROR, ERROR_AS_LOADED = "error {0}", "error {0} against the weights as loaded, whose file is not known"
COSINES = "cosine {mean} over {count} seeds (least {least}, seed {seed})"
UNRANKED = "The times were too noisy to rank: run it again while nothing else uses the machine."
NO_GAIN = "No setting is better than {reference}: faster by more than the times vary, or smaller and as fast."
SMALLEST, NEAREST = "Smallest: {small}.", "Closest: {closest}."
NONE_WORKS = "No setting gave a finite result."
COMPUTES_IN, FAST = "{device} computes in {compute}.", "Fast products: {fast}."
NOT_FASTER = "8-bit weights save memory here, and are not known to save time."
CALIBRATED = "Calibrated {layers} layers."
TO_SAVE = "Connect the calibration to Save Model, which rounds these layers with it."
LESS, KEPT_IN = "{file}: {before} -> {after}.", "Kept in {formats}: {kept} ({reasons})."
NOT_LESS = "{file} takes {after}, no less than before ({before}): its weights were in 8 bits or fewer already."
AS_IT_IS = "{file}: no weight is in 8 bits: {reasons}."
IN_INT8 = "In int8 the weights take {after} instead of {before}."
IDENTICAL = "Identical: no pixel differs."
HARD_TO_SEE = "The difference is hard to see: {psnr}."
VISIBLE = "The difference is visible side by side: {psnr}."
PLAIN = "The pictures differ clearly: {psnr}."


@dataclass(frozen=True)
class Result:
    """A node's result as the page shows it.

    Args:
        sentence: a message, with a template of this file, or several that are joined: the page shows
            the first large, as the answer, the second as its line, and folds the others.
        tone: good, warn or bad.
        head, rows: a table; ``marked``: the row that matters most, from 0. A cell beyond the head
        is its row's tooltip.
        text: all of it.
        toast: whether the page tells it as a message too.
        use: ``storage`` and ``compute`` of loaders, and as ``rules`` what is computed in, for a
            button that puts them into the workflow; of the one node its ``storage``.
        copied: what a button copies for others to read; empty for none.
        sizes: bytes of the weights before and after, for a bar; None where nothing is compared.
        stored: storage -> bytes of the weights after.
        speed: the measured speed of int8 on cards of this kind, in a line; empty where it is not known.
        best: rows for goals: ``goals`` (speed, memory, quality), ``name``, ``seconds``, ``bytes``,
            ``error`` (a share of 1) and ``use``.
    """

    sentence: str
    tone: str = GOOD
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marked: int | None = None
    text: str = ""
    toast: bool = False
    use: Mapping[str, str] | None = None
    copied: str = ""
    sizes: tuple[int, int] | None = None
    stored: Mapping[str, int] = field(default_factory=dict)
    speed: str = ""
    best: Sequence[Mapping[str, object]] = ()

    def ui(self) -> dict[str, tuple[str]]:
        """Make a node's ui output of the result, with the text where other packs' viewers look."""
        data = asdict(self)
        shown = json.dumps({**data, "messages": messages_in(data)}, allow_nan=False)
        return {"text": (self.text,), RESULT_KEY: (shown,)}
