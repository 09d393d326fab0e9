"""Draw the banner of the pack's page on the registry: the picture of the README below the name.

.venv/bin/python scripts/assets/banner.py
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from thumbnails import DIM, GROUND, INK

IMAGES = Path(__file__).absolute().parents[2] / "docs" / "images"
SIZE = (1050, 450)
"""21 to 9."""


def main() -> None:
    banner = Image.new("RGB", SIZE, GROUND)
    draw = ImageDraw.Draw(banner)
    story = Image.open(IMAGES / "rescue.jpg").convert("RGB")
    story = story.resize((round(story.width * 270 / story.height), 270), Image.Resampling.LANCZOS)
    banner.paste(story, ((SIZE[0] - story.width) // 2, 118))
    draw.text((SIZE[0] / 2, 58), "Halfsafe", font=ImageFont.load_default(72), fill=INK, anchor="mm")
    draw.text(
        (SIZE[0] / 2, 420),
        "no black images - half the memory - fp8, int8, fp16, bf16",
        font=ImageFont.load_default(26),
        fill=DIM,
        anchor="mm",
    )
    banner.save(IMAGES / "banner.jpg", quality=88, optimize=True)


if __name__ == "__main__":
    main()
