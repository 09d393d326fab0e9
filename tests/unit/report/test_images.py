import math

import numpy as np
import pytest
import torch
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.report.images import LUMA, compare, difference_image, result_of_images

pytestmark = pytest.mark.usefixtures("one_thread")


def image(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def by_the_paper(x, y):
    """SSIM of two (height, width) arrays, one 11 x 11 window after the other."""
    places = np.arange(11) - 5
    window = np.exp(-(places[:, None] ** 2 + places[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for row in range(x.shape[0] - 10):
        for column in range(x.shape[1] - 10):
            a, b = x[row : row + 11, column : column + 11], y[row : row + 11, column : column + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            covariance = (window * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + 1e-4) * (2 * covariance + 9e-4)
                / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4))
            )  # fmt: skip
    return float(np.mean(values))


@pytest.mark.parametrize("noise", [0.01, 0.1, 1.0])
def test_ssim_is_the_formula_of_the_paper(noise):
    a = image(24, 19, 3)
    b = (a + noise * (image(24, 19, 3, seed=1) - 0.5)).clamp(0, 1)
    weights = torch.tensor(LUMA, dtype=torch.float64)
    expected = by_the_paper(*((each.double() @ weights).numpy() for each in (a, b)))
    assert compare(a[None], b[None])[0].ssim == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("shift", "height", "width", "channels"), [(1e-4, 1, 40, 3), (0.01, 17, 5, 1), (0.9, 40, 1, 4)]
)
def test_a_constant_shift_has_the_psnr_it_must_have(shift, height, width, channels):
    a = torch.full((1, height, width, channels), 0.05)
    found = compare(a, a + shift)[0]
    assert found.psnr == pytest.approx(-20 * math.log10(shift), abs=0.05)
    assert found.largest == pytest.approx(shift, abs=1e-6)


@pytest.mark.parametrize(
    ("noise", "batch", "size"), [(0.0, 1, (7, 30)), (0.1, 3, (16, 16)), (0.5, 2, (1, 1)), (0.01, 1, (40, 12))]
)
def test_identical_is_perfect_and_both_directions_agree(noise, batch, size):
    a = image(batch, *size, 3)
    for one in compare(a, a.clone()):
        assert one.largest == 0 and one.psnr == math.inf and one.ssim == pytest.approx(1, abs=1e-9)
    b = (a + noise * (image(batch, *size, 3, seed=1) - 0.5)).clamp(0, 1)
    for there, back in zip(compare(a, b), compare(b, a), strict=True):
        assert there.psnr == back.psnr and there.largest == back.largest
        assert there.ssim == pytest.approx(back.ssim, abs=1e-9)
        assert -1 <= there.ssim <= 1 + 1e-9


def test_one_image_is_compared_with_all_of_a_batch():
    one, many = image(1, 16, 16, 3), image(3, 16, 16, 3, seed=1)
    assert compare(one, many) == [compare(one, many[index : index + 1])[0] for index in range(3)]
    assert len(compare(many, one)) == 3
    text = result_of_images(compare(one, many), 2.0).text
    assert len(text.splitlines()) == 5 and text.splitlines()[3].startswith("mean: ")


def test_images_that_do_not_go_together_are_refused():
    for a, b, words in (
        ((1, 8, 9, 3), (1, 9, 8, 3), "9 x 8 with 3 channels and 8 x 9 with 3 channels"), ((0, 8, 8, 3), (1, 8, 8, 3), "empty"),
        ((1, 8, 8, 3), (1, 8, 8, 4), "8 x 8 with 3 channels and 8 x 8 with 4"), ((2, 8, 8, 3), (3, 8, 8, 3), "2 reference images, 3 candidate"),
    ):  # fmt: skip
        for call in (compare, difference_image):
            with pytest.raises(HalfsafeError, match=words):
                call(torch.zeros(a), torch.zeros(b))


@pytest.mark.parametrize(("shift", "words"), [
    (0, "Identical"), (0.005, "hard to see: 46.0 dB"), (0.02, "side by side: 34.0 dB"), (0.1, "clearly: 20.0 dB"), (math.nan, "NaN or Inf in candidate."),
])  # fmt: skip
def test_the_eye_is_told_what_the_figures_mean(shift, words):
    a = torch.full((2, 16, 16, 3), 0.5)
    found = result_of_images(compare(a, a + shift), 1.0)
    assert words in found.sentence


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_reported_and_the_rest_is_compared(value):
    a = image(1, 32, 32, 3)
    b = (a + 0.1).clone()
    b[0, 3, 4, 1] = value
    found = compare(a, b)[0]
    assert found.bad == (0, 1) and found.psnr == pytest.approx(20, abs=0.01) and 0 < found.ssim < 1
    assert "1 values of the candidate are NaN or Inf" in result_of_images([found], 1.0).text
    picture, gain = difference_image(a, b)
    assert torch.equal(picture[0, 3, 4], torch.tensor([1.0, 0.0, 1.0]))
    assert gain == pytest.approx(9, rel=1e-4) and torch.isfinite(picture).all()
    nothing = compare(a, torch.full_like(a, value))[0]
    assert (
        math.isnan(nothing.psnr)
        and math.isnan(nothing.ssim)
        and "PSNR unknown" in result_of_images([nothing], 1.0).text
    )
    assert "identical" not in result_of_images(compare(b, b), 1.0).text


def test_the_difference_is_amplified_by_what_is_stated():
    a = image(2, 16, 16, 3) * 0.5
    b = a.clone()
    b[1, 2, 3, 0] += 0.02
    picture, gain = difference_image(a, b)
    assert gain == pytest.approx(45, rel=1e-3) and picture.shape == (2, 16, 16, 3)
    assert picture[1, 2, 3, 0].item() == pytest.approx(0.9, rel=1e-3) and picture.sum().item() == pytest.approx(
        0.9, rel=1e-3
    )
    assert "amplified 45 times" in result_of_images(compare(a, b), gain).text
    assert difference_image(a, a)[1] == 1.0
    assert difference_image(a, a + 1e-6)[1] == 255.0


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_alpha_and_grey_are_seen(channels):
    a = image(1, 16, 16, channels) * 0.5
    b = a.clone()
    b[0, 2, 3, -1] += 0.1
    found, (picture, _) = compare(a, b)[0], difference_image(a, b)
    assert found.largest == pytest.approx(0.1, abs=1e-6) and found.psnr < 60
    assert picture.shape[-1] == 3 and torch.allclose(picture[0, 2, 3], torch.full((3,), 0.9), atol=1e-3)
