"""Put the two pictures of a setting that was measured with several seeds below the chart."""

import numpy as np
from PIL import Image, ImageDraw

from ..base.message import Message
from ..report.draw import BACKGROUND, MARGIN, ROW_HEIGHT, write_text
from .tradeoffs import Measurements


def with_pictures(chart: np.ndarray, found: Measurements) -> np.ndarray:
    """Return a chart with the pictures of ``found.shown`` beside one another below it, each below
    its caption; without pictures, the chart as it is.

    ``chart``: fp32 (height, width, 3) from 0 to 1. A pixel of a picture is one of a latent:
    pictures are enlarged without smoothing.
    """
    row = found.shown
    if row is None or not row.pictures:
        return chart
    height, width = chart.shape[:2]
    each = (width - MARGIN) // 2 - MARGIN
    tall = round(each * row.pictures[0].shape[0] / row.pictures[0].shape[1])
    image = Image.new("RGB", (width, height + ROW_HEIGHT + tall + MARGIN), BACKGROUND)
    image.paste(Image.fromarray(np.rint(chart * 255).astype(np.uint8)), (0, 0))
    for place, (picture, setting) in enumerate(zip(row.pictures, (found.reference.setting, row.setting), strict=True)):
        left = MARGIN + place * (each + MARGIN)
        caption = Message("{0}, after four steps, seed {1} (least cosine)", setting, found.seed + row.worst)
        write_text(ImageDraw.Draw(image), left, height, caption, each, 15)
        drawn = Image.fromarray(picture).resize((each, tall), Image.Resampling.NEAREST)
        image.paste(drawn, (left, height + ROW_HEIGHT))
    return np.array(image).astype(np.float32) / 255
