"""Pictures of plain shapes: the data the shapes model is trained on, and a reader that says what a picture shows."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ASSETS = Path(__file__).absolute().parent.parent / "assets"
MODEL, VAE = ASSETS / "shapes.safetensors", ASSETS / "shapes_vae.safetensors"
SIZE = 128
COLOURS = {
    "red": (0.86, 0.15, 0.15),
    "green": (0.13, 0.63, 0.27),
    "blue": (0.16, 0.33, 0.86),
    "yellow": (0.97, 0.82, 0.14),
    "orange": (0.95, 0.50, 0.10),
    "purple": (0.53, 0.22, 0.72),
}
BACKGROUNDS = {
    "white": (0.94, 0.94, 0.93),
    "black": (0.09, 0.09, 0.11),
    "grey": (0.55, 0.56, 0.58),
    "pink": (0.97, 0.72, 0.79),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross")
RESIDUAL_WRITERS = ("img_in.proj.", "img_attn.proj.", "img_mlp.2.")
MIN_OVERLAP = 0.7


@dataclass(frozen=True)
class Shape:
    """What a picture shows."""

    colour: str
    shape: str
    background: str = "white"

    def prompt(self) -> str:
        """The prompt that asks for it."""
        plain = f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} {self.shape}"
        return plain if self.background == "white" else f"{plain} on a {self.background} background"


def all_shapes() -> list[Shape]:
    """Every combination of colour, shape and background."""
    return [Shape(*parts) for parts in itertools.product(COLOURS, SHAPES, BACKGROUNDS)]


def render(
    shape: Shape, centre: tuple[float, float] = (0.0, 0.0), radius: float = 0.6, size: int = SIZE
) -> torch.Tensor:
    """Draw a shape with a soft shadow: RGB in 0..1, (3, size, size). Centre and radius in half widths of the picture."""
    x, y = _grid(size)
    x, y = x - centre[0], y - centre[1]
    light = (1.0 + 0.12 * (y - x)).clamp(0.8, 1.2)
    back = _rgb(BACKGROUNDS[shape.background]) * (1.0 + 0.06 * y)
    shadow = _cover(_distance(shape.shape, x - 0.05, y + 0.07, radius), 0.12)
    back = back * (1.0 - 0.35 * shadow)
    cover = _cover(_distance(shape.shape, x, y, radius), 2.0 / size)
    return (back * (1 - cover) + _rgb(COLOURS[shape.colour]) * light * cover).clamp(0.0, 1.0)


def read_picture(picture: bytes | np.ndarray) -> Shape | None:
    """What a picture shows, or None where it shows none of the shapes, as a black one.

    Args:
        picture: an encoded picture, or RGB of shape (height, width, 3) in 0..1.
    """
    pixels = pixels_of(picture)
    background = np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]), axis=0)
    mask = _object_mask(pixels, background)
    if not 0.02 < mask.mean() < 0.7:
        return None
    name, overlap = max(((n, _overlap(mask, n)) for n in SHAPES), key=lambda found: found[1])
    if overlap < MIN_OVERLAP:
        return None
    colour = _nearest(np.median(pixels[_core(mask)], axis=0), COLOURS)
    return Shape(colour, name, _nearest(background, BACKGROUNDS))


def pixels_of(picture: bytes | np.ndarray) -> np.ndarray:
    """RGB of a picture in 0..1, fp32, (height, width, 3); NaN as 0, as a saved picture has it."""
    if isinstance(picture, bytes):
        return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), dtype=np.float32) / 255
    return np.nan_to_num(np.asarray(picture, dtype=np.float32))


def overflowing(tensors: dict[str, torch.Tensor], factor: float = 2.0**13) -> dict[str, torch.Tensor]:
    """The shapes model's tensors with everything that writes to the image's stream multiplied by a power of two.

    The stream leaves fp16's range, and is only ever read through layer norms, which divide the power out again.
    """
    return {
        name: tensor * factor if any(part in name for part in RESIDUAL_WRITERS) else tensor
        for name, tensor in tensors.items()
    }


def side_by_side(pictures: list[bytes], columns: int | None = None, gap: int = 8) -> Image.Image:
    """The pictures in a grid on white."""
    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    columns = columns or len(images)
    width, height = images[0].width + gap, images[0].height + gap
    sheet = Image.new("RGB", (columns * width - gap, -(-len(images) // columns) * height - gap), "white")
    for index, image in enumerate(images):
        sheet.paste(image, (index % columns * width, index // columns * height))
    return sheet


def _grid(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    return axis[None, :].expand(size, size), -axis[:, None].expand(size, size)


def _rgb(colour: tuple[float, float, float]) -> torch.Tensor:
    return torch.tensor(colour).view(3, 1, 1)


def _cover(distance: torch.Tensor, softness: float) -> torch.Tensor:
    return (0.5 - distance / softness).clamp(0.0, 1.0)


def _distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: float) -> torch.Tensor:
    """Signed distance to the edge of a shape, negative inside; exact near it."""
    return _DISTANCES[shape](x / radius, y / radius) * radius


def _circle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x, y) - 0.9


def _square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.8


def _triangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y = y + 0.15
    return torch.maximum(-y - 0.5, x.abs() * (3**0.5 / 2) + y / 2 - 0.5)


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = math.cos(math.pi / 5), -math.sin(math.pi / 5)
    x = x.abs()
    for sign in (1.0, -1.0):
        reach = 2 * (sign * a * x + b * y).clamp(min=0)
        x, y = x - reach * sign * a, y - reach * b
    x, y = x.abs(), y - 1.0
    edge_x, edge_y = -0.45 * b, 0.45 * a - 1.0
    along = ((x * edge_x + y * edge_y) / (edge_x**2 + edge_y**2)).clamp(0, 1)
    return torch.hypot(x - edge_x * along, y - edge_y * along) * torch.sign(y * edge_x - x * edge_y)


def _heart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = 1.6
    x, y = x.abs() / scale, y / scale + 0.55
    lobe = torch.hypot(x - 0.25, y - 0.75) - 2**0.5 / 4
    half = 0.5 * (x + y).clamp(min=0)
    tip = torch.minimum(x.square() + (y - 1).square(), (x - half).square() + (y - half).square()).sqrt()
    return torch.where(x + y > 1, lobe, tip * torch.sign(x - y)) * scale


def _cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.abs(), y.abs()
    return torch.minimum(torch.maximum(x - 0.9, y - 0.3), torch.maximum(x - 0.3, y - 0.9))


_DISTANCES = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "cross": _cross,
}


def _object_mask(pixels: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Pixels whose hue, or brightness against a grey, is the object's and not the background's or its shadow's."""
    nearest = np.stack([_colour_distance(pixels, np.array(colour)) for colour in COLOURS.values()]).min(axis=0)
    shaded = np.stack([_colour_distance(pixels, background * shade) for shade in (0.65, 0.75, 0.85, 0.95, 1.05)]).min(
        axis=0
    )
    return nearest < shaded


def _colour_distance(pixels: np.ndarray, colour: np.ndarray) -> np.ndarray:
    return np.linalg.norm(pixels - colour, axis=-1)


def _core(mask: np.ndarray) -> np.ndarray:
    """The mask without its edge."""
    core = mask.copy()
    for axis, shift in itertools.product((0, 1), (3, -3)):
        core &= np.roll(mask, shift, axis)
    return core if core.any() else mask


def _overlap(mask: np.ndarray, shape: str) -> float:
    """Intersection over union of two masks, each scaled to its own bounding box."""
    ours, template = _normalised(mask), _normalised(_template(shape))
    return float((ours & template).sum() / (ours | template).sum())


def _template(shape: str) -> np.ndarray:
    x, y = _grid(SIZE)
    return (_distance(shape, x, y, 0.8) < 0).numpy()


def _normalised(mask: np.ndarray, size: int = 64) -> np.ndarray:
    rows, columns = np.flatnonzero(mask.mean(axis=1) > 0.01), np.flatnonzero(mask.mean(axis=0) > 0.01)
    if not rows.size or not columns.size:
        return np.zeros((size, size), dtype=bool)
    box = Image.fromarray(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return np.asarray(box.resize((size, size), Image.Resampling.NEAREST))


def _nearest(colour: np.ndarray, names: dict[str, tuple]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(colour - np.array(names[name]))))


def main(command: str, *paths: str) -> None:
    """`sheet TARGET PICTURE...` or `read PICTURE...` (one JSON line each)."""
    if command == "sheet":
        side_by_side([Path(path).read_bytes() for path in paths[1:]]).save(paths[0], quality=90)
    else:
        for path in paths:
            seen = read_picture(Path(path).read_bytes())
            print(json.dumps(seen and seen.prompt()))


if __name__ == "__main__":
    main(*sys.argv[1:])


def conditioning(folder: Path, shape: Shape = Shape("blue", "star", "pink")) -> list:
    """A prompt of the shapes model, encoded by the small random text encoder that it was trained with; its file is kept in ``folder``."""
    from comfy.sd import CLIPType, load_clip
    from support import tiny_models

    path = folder / "clip_l.safetensors"
    encoder = load_clip([str(path if path.exists() else tiny_models.clip_l(path))], clip_type=CLIPType.WAN)
    return encoder.encode_from_tokens_scheduled(encoder.tokenize(shape.prompt()))
