"""Compare images: PSNR, the largest difference, SSIM, and the difference as a picture."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .errors import HalfsafeError

WINDOW = 11
SIGMA = 1.5
K1, K2 = 0.01, 0.03
LUMA = (0.299, 0.587, 0.114)
BRIGHTEST = 0.9
MAX_GAIN = 255.0


@dataclass(frozen=True)
class Difference:
    """Two images, values in 0..1. ``psnr`` in dB, inf when identical; ``bad``: values that are NaN or Inf, of each.

    With such values the figures are of the pixels where both are finite; NaN where there is none.
    """

    psnr: float
    largest: float
    ssim: float
    bad: tuple[int, ...] = (0, 0)

    @property
    def identical(self) -> bool:
        return self.largest == 0 and self.bad == (0, 0)


def compare(reference: torch.Tensor, candidate: torch.Tensor) -> list[Difference]:
    """Compare pairs of images, one :class:`Difference` per pair.

    Args:
        reference, candidate: (batch, height, width, channels), any number of channels; a batch of one is compared with
            each image of the other.

    Raises:
        HalfsafeError: the sizes, channels or batches do not go together.
    """
    return [_difference(*pair) for pair in _pairs(reference, candidate)]


def _pairs(reference: torch.Tensor, candidate: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    a, b = tuple(reference.shape), tuple(candidate.shape)
    if a[1:3] != b[1:3]:
        problem = f"The images differ in size: reference {a[2]} x {a[1]}, candidate {b[2]} x {b[1]} pixels."
        raise HalfsafeError(problem, "Compare images made at the same size; scaling one would hide the difference.")
    if a[3] != b[3]:
        problem = f"The images differ in channels: reference {a[3]}, candidate {b[3]}."
        raise HalfsafeError(problem, "Remove the alpha channel of one, or add it to the other.")
    if a[0] != b[0] and 1 not in (a[0], b[0]):
        problem = f"The batches differ: {a[0]} reference images, {b[0]} candidate images."
        raise HalfsafeError(problem, "Give batches of the same length, or one image to compare all others with.")
    if 0 in a or 0 in b:
        raise HalfsafeError("There is no image to compare: one input is empty.", "Check the node before it.")
    count = max(a[0], b[0])
    return [(reference[index % a[0]], candidate[index % b[0]]) for index in range(count)]


def _difference(reference: torch.Tensor, candidate: torch.Tensor) -> Difference:
    a, b = reference.detach().cpu().double(), candidate.detach().cpu().double()
    bad = tuple(int((~torch.isfinite(image)).sum()) for image in (a, b))
    finite = (torch.isfinite(a) & torch.isfinite(b)).all(-1)
    if not finite.any():
        return Difference(math.nan, math.nan, math.nan, bad)
    error = (a - b)[finite]
    return Difference(psnr(error.square().mean().item()), error.abs().max().item(), ssim(a, b, finite), bad)


def psnr(mean_square: float) -> float:
    """Compute the peak signal to noise ratio in dB of images in 0..1 from their mean squared error; inf for 0."""
    return math.inf if mean_square == 0 else -10 * math.log10(mean_square)


def ssim(a: torch.Tensor, b: torch.Tensor, finite: torch.Tensor | None = None) -> float:
    """Compute the mean structural similarity of the luma of two images (height, width, channels) in 0..1:
    1 when identical.

    Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to structural similarity", IEEE
    Transactions on Image Processing 13(4), 2004: a Gaussian window of 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03,
    over the places where the whole window is inside the image. In an image smaller than that the window is as large as
    the image. Channels beyond three, such as alpha, do not count. ``finite``: (height, width);
    windows with any other pixel are left out.
    """
    if finite is None:
        finite = torch.ones(a.shape[:2], dtype=torch.bool)
    x, y = (torch.where(finite, luma(image), 0.0)[None, None] for image in (a, b))
    rows, columns = (_gaussian(min(WINDOW, size)) for size in a.shape[:2])

    def blurred(image: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(image, rows.view(1, 1, -1, 1)), columns.view(1, 1, 1, -1))

    mean_x, mean_y = blurred(x), blurred(y)
    variance_x, variance_y = blurred(x * x) - mean_x**2, blurred(y * y) - mean_y**2
    covariance = blurred(x * y) - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    similarity /= (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    inside = blurred((~finite).double()[None, None]) == 0
    return similarity[inside].mean().item() if inside.any() else math.nan


def luma(image: torch.Tensor) -> torch.Tensor:
    """Convert (height, width, channels) to luma (height, width), ITU-R BT.601;
    with fewer than three, the first channel."""
    if image.shape[-1] < 3:
        return image[..., 0]
    return image[..., :3] @ torch.tensor(LUMA, dtype=image.dtype)


def _gaussian(length: int) -> torch.Tensor:
    places = torch.arange(length, dtype=torch.float64) - (length - 1) / 2
    window = torch.exp(-(places**2) / (2 * SIGMA**2))
    return window / window.sum()


def difference_image(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Draw the absolute difference, amplified: (batch, height, width, 3), and the factor.

    One factor for the whole batch brings the largest difference to 0.9; it is 255 at most. A difference in alpha shows
    in all three channels. A pixel that is NaN or Inf in either image is magenta.
    """
    pairs = [(a.detach().cpu().float(), b.detach().cpu().float()) for a, b in _pairs(reference, candidate)]
    differences = torch.stack([(a - b).abs() for a, b in pairs])
    bad = ~torch.isfinite(differences).all(-1)
    differences[bad] = 0.0
    largest = differences.max().item()
    gain = min(MAX_GAIN, BRIGHTEST / largest) if largest else 1.0
    picture = (_as_colour(differences) * gain).clamp_(0, 1)
    picture[bad] = torch.tensor((1.0, 0.0, 1.0))
    return picture, gain


def _as_colour(differences: torch.Tensor) -> torch.Tensor:
    """Convert to three channels: a fourth raises all of them, fewer than three become grey."""
    if differences.shape[-1] < 3:
        return differences.amax(-1, keepdim=True).repeat(1, 1, 1, 3)
    if differences.shape[-1] == 3:
        return differences
    return torch.maximum(differences[..., :3], differences[..., 3:].amax(-1, keepdim=True))


def compare_text(differences: list[Difference], gain: float) -> str:
    """Write a line per pair of images, their mean, and the factor of the difference image."""
    lines = [
        _line(f"image {number}: " if len(differences) > 1 else "", one) for number, one in enumerate(differences, 1)
    ]
    if len(differences) > 1:
        lines.append(_line("mean: ", _mean(differences)))
    return "\n".join([*lines, f"difference image: amplified {gain:.3g} times"])


def _mean(differences: list[Difference]) -> Difference:
    """Average the images' figures: PSNR of the mean squared error, mean SSIM,
    the largest of the largest differences."""
    known = [one for one in differences if not math.isnan(one.largest)]
    bad = tuple(sum(one.bad[which] for one in differences) for which in (0, 1))
    if not known:
        return Difference(math.nan, math.nan, math.nan, bad)
    mean_square = sum(10 ** (-one.psnr / 10) for one in known) / len(known)
    similar = [one.ssim for one in known if not math.isnan(one.ssim)]
    similarity = sum(similar) / len(similar) if similar else math.nan
    return Difference(psnr(mean_square), max(one.largest for one in known), similarity, bad)


def _line(head: str, difference: Difference) -> str:
    if difference.identical:
        return f"{head}identical: PSNR inf dB, max error 0, SSIM 1"
    values = "PSNR " + _number(difference.psnr, ".2f") + " dB, max error " + _number(difference.largest, ".6g")
    notes = [
        f"{count} values of the {name} are NaN or Inf"
        for name, count in zip(("reference", "candidate"), difference.bad, strict=True)
        if count
    ]
    left_out = f" ({'; '.join(notes)}: those pixels are left out)" if notes else ""
    return f"{head}{values}, SSIM {_number(difference.ssim, '.6f')}{left_out}"


def _number(value: float, form: str) -> str:
    return "unknown" if math.isnan(value) else "inf" if math.isinf(value) else format(value, form)
