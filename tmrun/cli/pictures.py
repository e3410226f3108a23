"""Write pictures into a folder: SVG, and PNG where it is asked for and can be drawn. May not know: what is on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tmrun.cli import profiles
from tmrun.core.errors import UsageError
from tmrun.sim.svg import FAMILIES, Canvas

ZOOM = 2.0
"""PNG pixels for one of the SVG's."""


class Gallery:
    """A folder for pictures. Whatever can be missing is missed here, and not after minutes of work. Raises UsageError."""

    def __init__(self, folder: Path, *, png: bool) -> None:
        self.folder = folder
        self._convert = png_converter() if png else None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--plot {folder}: the folder cannot be made: {error.strerror}") from None

    def add(self, name: str, svg: str) -> None:
        """Write one, in every form. Raises UsageError."""
        profiles.save(self.folder / f"{name}.svg", svg.encode())
        if self._convert is not None:
            profiles.save(self.folder / f"{name}.png", self._convert(svg))


def png_converter() -> Callable[[str], bytes]:
    """SVG text -> PNG bytes. Raises UsageError when the library is missing, or a font that it could write with."""
    try:
        import resvg_py
    except ImportError:
        raise UsageError("--png: the library that draws it is not installed: pip install 'tmrun[png]'") from None

    def convert(svg: str) -> bytes:
        return resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM)

    empty, written = Canvas(40, 20), Canvas(40, 20)
    written.text(2, 15, "tmrun")
    if convert(empty.render()) == convert(written.render()):
        fonts = ", ".join(FAMILIES[:-1])
        raise UsageError(f"--png: none of the fonts {fonts} is on this machine: install one, such as Debian's fonts-dejavu-core")
    return convert
