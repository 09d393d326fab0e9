"""What an analysis found: figures of each layer and of the choice."""

import math
from dataclasses import dataclass, field

from .candidates import Candidate

CHOSEN, KEPT, PINNED, BARRED, UNUSED = "chosen", "kept", "pinned", "not possible", "never ran"


@dataclass
class LayerResult:
    """The figures of one layer. dB values are signal to noise ratios; None where nothing was measured.

    ``output_db``: of its output as a whole; ``channel_db``: the mean over its output channels, each by itself, which
    shows an error that larger channels hide. ``size``: parameters. ``flops``: of its matmuls in all calls of one run.
    ``sensitive``: the default preset keeps it. ``crest``: amax / rms of its input, the largest of its calls.
    """

    name: str
    cls: str
    size: int
    status: str
    reason: str = ""
    weight_db: float | None = None
    output_db: float | None = None
    channel_db: float | None = None
    flops: int = 0
    sensitive: bool = False
    crest: float | None = None

    @property
    def worst_db(self) -> float | None:
        return None if self.output_db is None else min(self.output_db, self.channel_db)


@dataclass
class Analysis:
    """The result of :func:`analyze`. ``snr_db``: end to end with the ``chosen`` layers, the worst call;
    inf for no error.

    ``all_db``: the same with all ``all_count`` layers that are not sensitive. ``calls``: model calls made, of them
    ``reference_calls`` unchanged. ``complete``: the search ended by itself, not by its bound on trials. ``free_db``:
    the SNR of a free run's result with the ``chosen`` layers;
    ``free_runs`` were made, and ``dropped`` layers kept because of them.
    """

    candidate: Candidate
    target_db: float
    layers: list[LayerResult] = field(default_factory=list)
    snr_db: float = math.inf
    all_db: float = math.inf
    all_count: int = 0
    trials: int = 0
    calls: int = 0
    reference_calls: int = 0
    complete: bool = True
    free_db: float = math.inf
    free_runs: int = 0
    dropped: int = 0

    def named(self, status: str) -> list[LayerResult]:
        return [layer for layer in self.layers if layer.status == status]

    @property
    def chosen(self) -> list[LayerResult]:
        return self.named(CHOSEN)
