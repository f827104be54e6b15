"""What a person sees while something is measured: how much of it is done, for how long, and about how long is left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from cs336_systems.cli import tell

_TICK_S = 1.0


@contextmanager
def progress(
    n_cells: int,
    n_done: int = 0,
    disable: bool = False,
    unit: str = "cell",
    follow: Callable[[], tuple[int, str]] | None = None,
) -> Generator[Any]:
    """A progress bar over cells, of which the first are done. That nobody can read it any more stops no measurement.

    On a terminal its clock goes on within a cell too, which may compile for a minute. With `follow` it is not for the
    caller to move: that is asked once a second, and at the end, for how many are done and what is at work.
    """
    with tqdm(total=n_cells, initial=n_done, unit=unit, file=WhileItCan(), disable=disable) as bar:
        ended, is_terminal = threading.Event(), sys.stderr.isatty()

        def look() -> None:
            if follow is not None:
                done, what = follow()
                bar.set_description(what, refresh=False)
                bar.update(done - bar.n)

        def tick() -> None:
            while not ended.wait(_TICK_S):
                look()
                if is_terminal:
                    bar.refresh()

        ticking = threading.Thread(target=tick, daemon=True)
        if (is_terminal or follow is not None) and not disable:
            ticking.start()
        try:
            yield bar
        finally:
            ended.set()
            if ticking.is_alive():
                ticking.join()
            look()


class Countdown:
    """Says before each of several commands, which show their own progress, which it is and about how long those that
    are left take, as long as those before on average: "[2 of 3] small-ctx256, about 40 s left"."""

    def __init__(self, n_commands: int) -> None:
        self._n, self._number = n_commands, 0
        self._began_s = time.perf_counter()

    def next(self, name: str) -> None:
        """Call it before each."""
        done, self._number = self._number, self._number + 1
        each_s = (time.perf_counter() - self._began_s) / done if done else 0.0
        left = f", about {duration(each_s * (self._n - done))} left" if done else ""
        tell(f"[{self._number} of {self._n}] {name}{left}")


def duration(seconds: float) -> str:
    """As a person says it: "40 s", "12 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class WhileItCan:
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
