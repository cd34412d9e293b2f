"""The process in which pictures are decoded: `python -m mlxr.pictures.worker`. It waits, answers once and ends.

Standard input is a line of JSON, with the `sizes` of the files in bytes and a `rule`, then the files. Standard output
has for each file a line of JSON, either an error message or the `grid` of its tiles and their `sizes`, [height, width],
followed by their pixels, three bytes each. A file's stated size is checked before a pixel is decoded; the system bounds
memory and time. Each kind of rule does what transformers does (image_processing_pil_*.py).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import resource
import sys
import warnings
from typing import Any

from PIL import Image, ImageOps

from mlxr.core.processes import limit

MAX_PIXELS, MAX_RATIO, MAX_LONG_RATIO, MAX_MEMORY_BYTES, MAX_PROCESSOR_S = 1 << 26, 200, 20_000, 2 << 30, 30
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
_PLUGINS = {"WEBP": "WebP"}
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_SEE_THROUGH = ("RGBA", "LA", "PA", "La", "RGBa")


class PictureRefused(Exception):
    """The picture cannot be read. The message says why, and continues "the picture"."""


def read(data: bytes, max_ratio: int = MAX_LONG_RATIO) -> Image.Image:
    """Return the picture upright, in three colours of 8 bits, with a white background if it is transparent.

    It is refused if one side is longer than `max_ratio` times the other.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])
    except Image.DecompressionBombError as error:
        raise PictureRefused(_describe_size(error)) from None
    except Exception:
        raise PictureRefused(f"is none of the kinds that can be read: {', '.join(FORMATS)}") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise PictureRefused(f"has {width} x {height} pixels, more than {MAX_PIXELS}; send a smaller one")
    if min(width, height) < 1:
        raise PictureRefused(f"has {width} x {height} pixels")
    if max(width, height) > max_ratio * min(width, height):
        raise PictureRefused(f"has {width} x {height} pixels; its sides may differ by a factor of {max_ratio}")
    try:
        image.load()
        return _flatten(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except Exception as error:  # a stranger's file can be wrong in any way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PictureRefused(f"is broken or cut off: {reason}") from None


def _describe_size(error: Exception) -> str:
    return f"has more than {MAX_PIXELS} pixels ({' '.join(str(error).split())[:120]}); send a smaller one"


def _flatten(image: Image.Image) -> Image.Image:
    if image.mode in _WIDE:
        wide = image.convert("I")
        low, high = (int(end) for end in wide.getextrema() if not isinstance(end, tuple))
        if not 0 <= low <= high < 1 << 16:
            raise PictureRefused("has shades of more than 16 bits")
        shades = wide.tobytes()
        return Image.frombytes("L", image.size, shades[(1 if sys.byteorder == "little" else 2) :: 4]).convert("RGB")
    if image.mode == "F":
        raise PictureRefused("has shades that are no whole numbers")
    if image.mode in _SEE_THROUGH or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def choose_size(height: int, width: int, factor: int, least: int, most: int, fewest: int = 0) -> tuple[int, int]:
    """Return height and width as an encoder takes them: near the picture's own, and of `least` to `most` pixels.

    A side shorter than half of `factor` counts as `fewest` times `factor`; with 0, the picture then grows.
    """
    rows, columns = (max(fewest, round(side / factor)) * factor for side in (height, width))
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


Tiles = tuple[list[Image.Image], tuple[int, int]]  # tiles, and their numbers of rows and columns


def _take_near(image: Image.Image, rule: dict[str, int]) -> Tiles:
    """Return the picture near its own size (qwen2_vl); if the rule `grows`, each side is at least a factor (glm4v)."""
    sides, factor = (image.height, image.width), rule["factor"]
    if rule.get("grows") and min(sides) < factor:
        scale = max(factor / sides[0], factor / sides[1])
        sides = int(sides[0] * scale), int(sides[1] * scale)
    rows, columns = choose_size(*sides, factor, rule["least"], rule["most"])
    return [image.resize((columns, rows), Image.Resampling.BICUBIC)], (1, 1)


def _take_square(image: Image.Image, rule: dict[str, int]) -> Tiles:
    """Return the picture stretched to a square (gemma3)."""
    return [image.resize((rule["side"], rule["side"]), Image.Resampling(rule["resample"]))], (1, 1)


def _take_within(image: Image.Image, rule: dict[str, int]) -> Tiles:
    """Return the picture with its longer side at most `longest`, or less if it has too many patches (pixtral)."""
    longest, factor = rule["longest"], rule["factor"]
    while True:
        ratio = max(image.height / longest, image.width / longest)
        sides = [math.floor(side / ratio) if ratio > 1 else side for side in (image.height, image.width)]
        rows, columns = (max(1, (side - 1) // factor + 1) for side in sides)
        if rows * columns <= rule["most"] or longest <= factor:
            return [image.resize((columns * factor, rows * factor), Image.Resampling.BICUBIC)], (1, 1)
        longest = max(factor, longest - factor)


def _take_budget(image: Image.Image, rule: dict[str, int]) -> Tiles:
    """Return the picture resized, in its shape, to as near `most` whole squares as possible (gemma4)."""
    factor, most = rule["factor"], rule["most"]
    scale = math.sqrt(most * factor**2 / (image.height * image.width))
    rows, columns = (math.floor(scale * side / factor) for side in (image.height, image.width))
    if not rows:
        rows, columns = 1, max(1, min(image.width // image.height, most))
    elif not columns:
        rows, columns = min(image.height // image.width, most), 1
    return [image.resize((columns * factor, rows * factor), Image.Resampling.BICUBIC)], (1, 1)


def _take_tiles(image: Image.Image, rule: dict[str, int]) -> Tiles:
    """Return tiles of the picture, and all of it as one more; the picture shrinks if these are too many (idefics3)."""
    tile, longest = rule["tile"], rule["longest"]
    first, second = _size_tiles(image.height, image.width, longest, tile)
    while longest > tile and (second[0] // tile) * (second[1] // tile) + 1 > rule["most"]:
        longest = max(tile, longest - tile)
        first, second = _size_tiles(image.height, image.width, longest, tile)
    for height, width in (first, second):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    rows, columns = second[0] // tile, second[1] // tile
    if rows * columns == 1:
        return [image], (1, 1)
    places = [(column * tile, row * tile) for row in range(rows) for column in range(columns)]
    tiles = [image.crop((left, top, left + tile, top + tile)) for left, top in places]
    return [*tiles, image.resize((tile, tile), Image.Resampling.LANCZOS)], (rows, columns)


def _size_tiles(height: int, width: int, longest: int, tile: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return height and width of a picture with a longer side of `longest`, and the same rounded up to whole tiles."""
    ratio = width / height
    if width >= height:
        first = max(1, int(longest / ratio) + int(longest / ratio) % 2), longest
    else:
        first = longest, max(1, int(longest * ratio) + int(longest * ratio) % 2)
    ratio = first[1] / first[0]
    if first[1] >= first[0]:
        columns = math.ceil(first[1] / tile)
        return first, (math.ceil(max(1, int(columns * tile / ratio)) / tile) * tile, columns * tile)
    rows = math.ceil(first[0] / tile)
    return first, (rows * tile, math.ceil(max(1, int(rows * tile * ratio)) / tile) * tile)


def _take_spread(image: Image.Image, rule: dict[str, int]) -> Tiles:
    """Return the picture near its own size or, if it is too large, in tiles and also near a smaller size (lfm2_vl)."""
    factor, tile, most = rule["factor"], rule["tile"], rule["most"]
    height, width = image.height, image.width
    rows, columns = choose_size(height, width, factor, rule["least"], most, fewest=1)
    small = image.resize((columns, rows), Image.Resampling.BILINEAR)
    area = max(factor // 2, round(height / factor) * factor) * max(factor // 2, round(width / factor) * factor)
    if rule["most_tiles"] < 2 or area <= 2 * most:
        return [small], (1, 1)
    tiles, grid = _cut_grid(image, tile, 2, rule["most_tiles"], Image.Resampling.BILINEAR)
    return [*tiles, small], grid


def _take_grid(image: Image.Image, rule: dict[str, int]) -> Tiles:
    """Return the picture in tiles, in a grid near its shape, and also as a whole if these are several (got_ocr2)."""
    tile, resample = rule["tile"], Image.Resampling.BICUBIC
    tiles, grid = _cut_grid(image, tile, 1, max(1, rule["most_tiles"]), resample)
    return [*tiles, *([image.resize((tile, tile), resample)] if len(tiles) > 1 else [])], grid


def _cut_grid(image: Image.Image, tile: int, least: int, most: int, resample: Image.Resampling) -> Tiles:
    """Return the picture resized to `least` to `most` tiles, whose grid is nearest its shape; of two such grids, the
    larger one unless its area is twice the picture's."""
    height, width, counts = image.height, image.width, range(1, most + 1)
    grids = [(across, down) for across in counts for down in counts if least <= across * down <= most]
    best, difference = (1, 1), math.inf
    for across, down in sorted(grids, key=lambda one: one[0] * one[1]):
        away = abs(width / height - across / down)
        if away < difference or (away == difference and 2 * width * height > tile**2 * across * down):
            best, difference = (across, down), away
    large = image.resize((best[0] * tile, best[1] * tile), resample)
    places = [(across * tile, down * tile) for down in range(best[1]) for across in range(best[0])]
    return [large.crop((left, top, left + tile, top + tile)) for left, top in places], best[::-1]


_KINDS = {
    "near": _take_near,
    "square": _take_square,
    "tiles": _take_tiles,
    "within": _take_within,
    "budget": _take_budget,
    "spread": _take_spread,
    "grid": _take_grid,
}
_BOUNDED = ("near", "spread", "within")  # whose processors refuse, or fail with, what is longer than that


def prepare(data: bytes, rule: dict[str, Any]) -> Tiles:
    """Return the picture prepared by `rule`, whole or in tiles."""
    return _KINDS[rule["kind"]](read(data, MAX_RATIO if rule["kind"] in _BOUNDED else MAX_LONG_RATIO), rule)


def main() -> None:
    """Read the files, answer and end."""
    limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    limit(resource.RLIMIT_CPU, MAX_PROCESSOR_S)
    for name in FORMATS:
        with contextlib.suppress(ImportError):  # this Pillow cannot read them
            plugin = importlib.import_module(f"PIL.{_PLUGINS.get(name, name.title())}ImagePlugin")
            if hasattr(plugin, "DEFAULT_MAX_THREADS"):  # AVIF has it; threads count as processes below
                setattr(plugin, "DEFAULT_MAX_THREADS", 1)  # noqa: B010 - not every plugin has it
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        limit(kind, 0)
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    warnings.simplefilter("ignore")  # `read` looks at sizes itself
    source, target = sys.stdin.buffer, sys.stdout.buffer
    asked: dict[str, Any] = json.loads(source.readline() or '{"sizes": []}')  # no request came before the end of input
    for size in asked["sizes"]:
        try:
            tiles, grid = prepare(source.read(size), asked["rule"])
        except PictureRefused as error:
            target.write(json.dumps(str(error)).encode() + b"\n")
        except MemoryError:
            target.write(json.dumps(f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory").encode() + b"\n")
        except Exception as error:  # the others of the request are seen
            target.write(json.dumps(f"cannot be prepared: {type(error).__name__}").encode() + b"\n")
        else:
            said = {"grid": grid, "sizes": [[tile.height, tile.width] for tile in tiles]}
            target.write(json.dumps(said).encode() + b"\n" + b"".join(tile.tobytes() for tile in tiles))
    target.flush()


if __name__ == "__main__":
    main()
