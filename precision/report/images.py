"""Compare images: PSNR, the largest difference, SSIM, and the difference as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..base.dtypes import name_of
from ..base.errors import HalfsafeError
from ..base.message import Message, joined
from .result import BAD, GOOD, HARD_TO_SEE, IDENTICAL, NOT_FINITE, PLAIN, VISIBLE, WARN, Result

LUMA = (0.299, 0.587, 0.114)
MAGENTA = (1.0, 0.0, 1.0)
SENTENCES_FROM = ((math.inf, IDENTICAL, GOOD), (40, HARD_TO_SEE, GOOD), (30, VISIBLE, WARN), (-math.inf, PLAIN, WARN))
"""The least PSNR in dB -> what the eye makes of the difference."""


@dataclass(frozen=True)
class Difference:
    """The difference of two images with values in 0..1.

    ``mean_square``: of all values; ``bad``: how many values of each image are NaN or Inf. The
    figures are of the pixels where both images are finite, and NaN where no pixel is.
    """

    mean_square: float
    largest: float
    ssim: float
    bad: tuple[int, int] = (0, 0)

    @property
    def psnr(self) -> float:
        """The peak signal to noise ratio in dB: inf for identical images."""
        return math.inf if self.mean_square == 0 else -10 * math.log10(self.mean_square)


def compare(reference: torch.Tensor, candidate: torch.Tensor) -> list[Difference]:
    """Compare pairs of images (batch, height, width, channels); a batch of one is compared with
    each of the other.

    Raises:
        HalfsafeError: an input is no image, or the sizes, channels or batches do not go together.

    Example:
        >>> from halfsafe.precision.report.images import compare
        >>> (pair,) = compare(torch.zeros(1, 8, 8, 3), torch.full((1, 8, 8, 3), 0.1))
        >>> round(pair.psnr, 1)
        20.0
    """
    return [_difference(a.double(), b.double()) for a, b in _pairs(reference, candidate)]


def _pairs(reference: torch.Tensor, candidate: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    _require_image("reference", reference)
    _require_image("candidate", candidate)
    a, b = tuple(reference.shape), tuple(candidate.shape)
    if a[1:] != b[1:]:
        sized = "{0} x {1} with {2} channels"
        shapes = joined((Message(sized, width, height, channels) for _, height, width, channels in (a, b)), " and ")
        problem = Message("Reference and candidate differ in size: {0}.", shapes)
        raise HalfsafeError(problem, "Compare images made at the same size; scaling one would hide the difference.")
    if a[0] != b[0] and 1 not in (a[0], b[0]):
        problem = Message("The batches differ: {0} reference images, {1} candidate images.", a[0], b[0])
        raise HalfsafeError(problem, "Connect batches of equal length, or one image to compare all others with.")
    if 0 in a or 0 in b:
        raise HalfsafeError("There is no image to compare: one input is empty.", "Check the node before it.")
    left, right = reference.detach().cpu(), candidate.detach().cpu()
    return [(left[index % a[0]], right[index % b[0]]) for index in range(max(a[0], b[0]))]


def _require_image(name: str, image) -> None:
    is_tensor = isinstance(image, torch.Tensor)
    is_dense = is_tensor and image.layout is torch.strided and not (image.is_nested or image.is_meta)
    if is_dense and image.dim() == 4 and not (image.is_complex() or image.is_quantized):
        return
    held = f"{name_of(image.dtype)}, {image.layout}, {image.device}, {image.dim()}-D" if is_tensor else ""
    problem = Message("The {0} is no image, but {1} ({2}).", name, type(image).__name__, held)
    raise HalfsafeError(problem, "Connect an IMAGE: real numbers of shape (batch, height, width, channels).")


def _difference(a: torch.Tensor, b: torch.Tensor) -> Difference:
    finite = (torch.isfinite(a) & torch.isfinite(b)).all(-1)
    bad = int((~torch.isfinite(a)).sum()), int((~torch.isfinite(b)).sum())
    if not finite.any():
        return Difference(math.nan, math.nan, math.nan, bad)
    error = (a - b)[finite]
    return Difference(error.square().mean().item(), error.abs().max().item(), _ssim(a, b, finite), bad)


def _ssim(a: torch.Tensor, b: torch.Tensor, finite: torch.Tensor) -> float:
    """Compute the mean structural similarity of the luma of two images (height, width, channels) in
    0..1.

    Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to
    structural similarity", IEEE Transactions on Image Processing 13(4), 2004: a Gaussian window of
    11 x 11 with sigma 1.5 inside of the image, or as large as a smaller image. Windows with a pixel
    that is not ``finite`` (height, width) are left out.
    """
    x, y = (torch.where(finite, _luma(image), 0.0) for image in (a, b))
    places = [torch.arange(float(min(11, size)), dtype=a.dtype) for size in x.shape]
    rows, columns = (torch.exp(-((place - place.mean()) ** 2) / (2 * 1.5**2)) for place in places)
    maps = torch.stack([x, y, x * x, y * y, x * y, (~finite).to(a.dtype)])[:, None]
    blurred = F.conv2d(maps, (rows / rows.sum()).view(1, 1, -1, 1))  # along each axis: 22 products instead of 121
    blurred = F.conv2d(blurred, (columns / columns.sum()).view(1, 1, 1, -1))
    mean_x, mean_y, square_x, square_y, product, outside = blurred[:, 0]
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_y + c1) * (2 * (product - mean_x * mean_y) + c2)
    similarity /= (mean_x**2 + mean_y**2 + c1) * (square_x - mean_x**2 + square_y - mean_y**2 + c2)
    return similarity[outside == 0].mean().item()  # NaN where no window is inside


def _luma(image: torch.Tensor) -> torch.Tensor:
    """Convert (height, width, channels) to luma, ITU-R BT.601, or to the first of fewer than three
    channels."""
    if image.shape[-1] < 3:
        return image[..., 0]
    return image[..., :3] @ torch.tensor(LUMA, dtype=image.dtype)


def difference_image(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Draw the absolute difference, amplified: (batch, height, width, 3), and the factor.

    One factor for the whole batch brings the largest difference to 0.9; it is 255 at most. A
    difference in alpha shows in all three channels. A pixel that is NaN or Inf in either image is
    magenta.
    """
    differences = torch.stack([(a.double() - b.double()).abs() for a, b in _pairs(reference, candidate)])
    bad = ~torch.isfinite(differences).all(-1)
    differences[bad] = 0.0
    largest = differences.max().item()
    gain = min(255.0, 0.9 / largest) if largest else 1.0
    picture = (_as_colour(differences) * gain).clamp(0, 1).float()
    picture[bad] = torch.tensor(MAGENTA)
    return picture, gain


def _as_colour(differences: torch.Tensor) -> torch.Tensor:
    if differences.shape[-1] < 3:
        return differences.amax(-1, keepdim=True).repeat(1, 1, 1, 3)
    return differences[..., :3].maximum(differences[..., -1:]) if differences.shape[-1] > 3 else differences


def _text(differences: Sequence[Difference], gain: float) -> str:
    """Write a line per pair of images, their mean, and the factor of the difference image."""
    lines = [_line(one) for one in differences]
    if len(lines) > 1:
        lines = [f"image {number}: {line}" for number, line in enumerate(lines, 1)]
        lines.append(f"mean: {_line(_mean(differences))}")
    return "\n".join([*lines, Message("difference image: amplified {0} times", f"{gain:.3g}")])


def result_of_images(differences: Sequence[Difference], gain: float) -> Result:
    """Return a sentence on the visible difference of all pairs, and a text with the figures of
    each. ``gain``: the factor of the difference image."""
    mean = _mean(differences)
    names = ", ".join(name for name, count in zip(("reference", "candidate"), mean.bad, strict=True) if count)
    psnr = math.inf if names else mean.psnr
    sentence, tone = next(found[1:] for found in SENTENCES_FROM if psnr >= found[0])
    if names:
        sentence, tone = NOT_FINITE, BAD
    return Result(Message(sentence, names=names, psnr=f"{psnr:.1f} dB"), tone, text=_text(differences, gain))


def _mean(differences: Sequence[Difference]) -> Difference:
    """Average the figures of the images that have any; the largest difference is the largest of
    all."""
    figures = torch.tensor([(one.mean_square, one.ssim) for one in differences], dtype=torch.float64)
    mean_square, similarity = figures.nanmean(0).tolist()
    largest = max((one.largest for one in differences if not math.isnan(one.largest)), default=math.nan)
    bad = sum(one.bad[0] for one in differences), sum(one.bad[1] for one in differences)
    return Difference(mean_square, largest, similarity, bad)


def _line(one: Difference) -> str:
    if one.largest == 0 and one.bad == (0, 0):
        return "identical: PSNR inf dB, max error 0, SSIM 1"
    figures = (f"{one.psnr:.2f}", f"{one.largest:.6g}", f"{one.ssim:.6f}")
    known = ("unknown" if figure == "nan" else figure for figure in figures)
    text = Message("PSNR {0} dB, max error {1}, SSIM {2}", *known)
    counts = zip(("reference", "candidate"), one.bad, strict=True)
    notes = [Message("{0} values of the {1} are NaN or Inf", count, name) for name, count in counts if count]
    return Message("{0} ({1}: those pixels are left out)", text, joined(notes, "; ")) if notes else text
