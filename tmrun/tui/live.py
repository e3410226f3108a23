"""The only ``rich.Live``: draw a pure view again and again, hand keys on, give the terminal back as it was.

Reading happens on a thread of its own, so that a slow store never blocks a key. May not know: what is drawn, what keys mean, the store.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

T = TypeVar("T")
FRAME_S = 0.1
BURST_S = 0.2
"""News comes in bursts: nobody reads anew for each piece of it."""
_KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x1bOA": "up", b"\x1bOB": "down",
         b"\x1bOC": "right", b"\x1bOD": "left", b"\x1b": "esc", b"\r": "enter", b"\n": "enter", b"\x03": "ctrl-c"}  # fmt: skip


def width(default: int = 200) -> int:
    """Columns of the terminal; in a pipe as many as a line needs."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else default


def can_draw() -> bool:
    """Whether a full screen makes sense: a terminal on both sides, and nobody has asked for plain output."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in (None, "", "dumb")
    return sys.stdin.isatty() and sys.stdout.isatty() and not plain


def repeat(show: Callable[[], None], every_s: float) -> None:
    """Print again and again, on a terminal in place, until Ctrl-C. A failure of ``show`` ends it."""
    while True:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[2J")
            sys.stdout.flush()
        show()
        time.sleep(every_s)


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """Something that turns on stderr, with what is being worked on, for long calculations; nothing where there is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(what) as status:
        yield lambda words: status.update(f"{what}: {words}")


class Reader(Generic[T]):
    """Calls ``read`` on a thread, every ``every_s`` and whenever ``wake`` is called; keeps the newest value."""

    def __init__(self, read: Callable[[], T], every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self._moved = threading.Event()
        self._ended = False
        self.value: T | None = None
        self.error: Exception | None = None
        """Why the last reading failed; None when it did not."""
        self.read_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is news."""
        self._moved.set()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._moved.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._ended:
            try:
                self.value = self._read()
                self.read_at, self.error = time.monotonic(), None
            except Exception as error:  # told to the user by whoever draws; the reading goes on
                self.error = error
            self._moved.wait(self._every_s)
            self._moved.clear()
            time.sleep(BURST_S)


def full_screen(draw: Callable[[int, int], RenderableType], press: Callable[[str], bool]) -> None:
    """Draw until ``press`` returns False for a key. ``draw`` gets the width and height of the screen."""
    console = Console(highlight=False)
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            columns, rows = console.size
            live.update(draw(columns, rows), refresh=True)
            for key in keys(FRAME_S):
                if not press(key):
                    return


@contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """Keys as they are pressed, without Enter and without echo."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read(timeout_s: float) -> list[str]:
        if not select.select([fd], [], [], timeout_s)[0]:
            return []
        typed = os.read(fd, 1024)
        return split(typed) if typed else ["q"]  # the terminal is gone

    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def split(typed: bytes) -> list[str]:
    """Bytes of a terminal -> names of keys; what is unknown is left out."""
    keys = []
    while typed:
        known = next((k for k in sorted(_KEYS, key=len, reverse=True) if typed.startswith(k)), None)
        if known is not None:
            keys.append(_KEYS[known])
            typed = typed[len(known) :]
        else:
            keys += [chr(typed[0])] if 32 <= typed[0] < 127 else []
            typed = typed[1:]
    return keys
