"""The progress bar of everything that measures cell by cell."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

_TICK_S = 1.0


@contextmanager
def progress(n_cells: int, n_done: int = 0, disable: bool = False) -> Generator[Any]:
    """A progress bar over cells, of which the first are done. That nobody can read it any more stops no measurement.

    On a terminal its clock goes on within a cell too, which may compile for a minute.
    """
    with tqdm(total=n_cells, initial=n_done, unit="cell", file=_WhileItCan(), disable=disable) as bar:
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(_TICK_S):
                bar.refresh()

        if sys.stderr.isatty() and not disable:
            threading.Thread(target=tick, daemon=True).start()
        try:
            yield bar
        finally:
            ended.set()


class _WhileItCan:
    """Standard error, and nothing once that cannot be written to."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()  # tqdm asks it for the terminal's width
