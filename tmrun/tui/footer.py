"""The launcher's one live line, at the bottom of the terminal, while workers write above it.

Workers write to the terminal themselves, so nothing may be drawn over what they say: the terminal is told to scroll only the lines above
the last one, as apt does it. Without a terminal (or with NO_COLOR, or TERM=dumb) the line is printed now and then instead.
May not know: what the line says.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.text import Text

PLAIN_EVERY_S = 60.0
"""Without a terminal: how often the line is printed when nothing but numbers change."""
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[K"


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return size.columns, size.lines


class Footer:
    """Use from one thread. ``close`` gives the terminal back."""

    def __init__(
        self,
        stream: TextIO | None = None,
        size: Callable[[], tuple[int, int]] = _size,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._size, self._clock = stream or sys.stderr, size, clock
        self._draws = self._stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        self._region: tuple[int, int] | None = None
        self._plain = ""
        self._plain_at = 0.0
        self._text = Text()

    @property
    def live(self) -> bool:
        """Whether there is a terminal that is drawn on."""
        return self._draws

    def say(self, text: str) -> None:
        """A line of its own, above."""
        self._write(f"{text}\n")

    def show(self, text: Text, gist: str = "") -> None:
        """Set the line. ``gist``: what it is about; without a terminal it is printed at once when that changes."""
        self._text = text
        if self._draws:
            self._draw()
        elif (gist and gist != self._plain) or self._clock() - self._plain_at >= PLAIN_EVERY_S:
            self._plain, self._plain_at = gist, self._clock()
            self.say(f"tmrun: {text.plain}")

    def close(self) -> None:
        """The whole screen scrolls again, the line is gone."""
        if self._region is not None:
            self._write(f"{_SAVE}\x1b[r\x1b[{self._region[1]};1H{_CLEAR}{_RESTORE}{_CLEAR}")
            self._region = None

    def _draw(self) -> None:
        columns, rows = self._size()
        if rows < 3:
            return
        if self._region != (columns, rows):
            self.close()
            # one line further, so that what is in the last line is not lost; then the cursor goes back into the part that scrolls
            self._write(f"\n{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A")
            self._region = (columns, rows)
        self._write(f"{_SAVE}\x1b[{rows};1H{self._render(columns)}{_CLEAR}{_RESTORE}")

    def _render(self, columns: int) -> str:
        line = self._text.copy()
        line.truncate(columns - 1, overflow="ellipsis")
        out = io.StringIO()
        Console(file=out, force_terminal=True, color_system="256", width=columns, highlight=False).print(line, end="", no_wrap=True)
        return out.getvalue()

    def _write(self, text: str) -> None:
        """All of it at once, so that a worker's output does not come between."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._draws = False  # the terminal is gone; the job goes on
