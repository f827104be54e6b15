"""A run's metrics: one JSON object a line, on disk as soon as it is known, and a picture of them.

Lines have a `kind`: "run" (provenance and config; one more at each resume), "train" (each step), "validation", and
"event" (in words: an overflow, a refused checkpoint, the end).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict

from cs336_systems.files import write_atomically, writing
from cs336_systems.row_values import check_values

METRICS = "metrics.jsonl"
PLOT = "train.png"
_LONGEST_LINE = 2**16  # bytes

Measured = float | Literal["nan", "inf", "-inf"]


class _Line(TypedDict):
    step: int


class _RunLine(_Line):
    command: str


class _ValidationLine(_Line):
    loss: Measured


class _TrainLine(_ValidationLine):
    gradient_norm: Measured
    learning_rate: float
    loss_scale: float | None
    is_skipped: bool
    zero_gradient_share: float | None
    tokens_per_s: float


# What the lines of each kind have at least; they may have more.
_LINES = {"run": _RunLine, "train": _TrainLine, "validation": _ValidationLine, "event": _Line}


class MetricsFile:
    """Appends lines to a JSON Lines file; each is with the system when `write` returns, whatever ends the process.

    Args:
        path: the file; None on the ranks that write none.
        after_step: where a resumed run goes on. Steps after it, and a last line that was cut, are taken out: they will
            come again. None for a new file.
    """

    def __init__(self, path: Path | None, after_step: int | None = None) -> None:
        self._file, self._path = None, path
        if path is None:
            return
        lines = []
        if after_step is not None and path.exists():
            lines = [line for line in read_metrics(path) if line.get("step", 0) <= after_step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Adds a line; a number that JSON cannot hold (NaN, infinity) becomes its name in words. Raises NotWritten."""
        if self._file is None or self._path is None:
            return
        plain = {name: _jsonable(value) for name, value in values.items()}
        with writing(self._path):
            self._file.write(json.dumps({"kind": kind, **plain}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Raises NotWritten where what a failed `write` left does not go to disk now either."""
        if self._file is not None and self._path is not None:
            with writing(self._path):
                self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def last_step(path: Path) -> int:
    """The step of the last whole line of a metrics file, which is looked at from its end; 0 if there is none there.

    Raises OSError where the file cannot be read, and ValueError for a line that `MetricsFile` did not write.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a last line that a kill cut short is left out.

    Raises ValueError, naming the file and the line's number, for any other line that a run did not write.
    """
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):  # behind the last: "", or a cut line
        try:
            values = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: is no line of metrics ({error})") from error
        if not isinstance(values, dict) or str(values.get("kind")) not in _LINES:
            kinds = ", ".join(_LINES)
            raise ValueError(f"{path}, line {number}: is no line of metrics (it must be an object of a kind: {kinds})")
        line_type = _LINES[values["kind"]]
        if missing := line_type.__annotations__.keys() - values:
            raise ValueError(f"{path}, line {number}: is no line of metrics (it lacks {', '.join(sorted(missing))})")
        check_values(line_type, values, f"{path}, line {number}: ")
        lines.append(values)
    return lines


def plot_metrics(metrics: Path, path: Path) -> None:
    """Losses over steps, and beside them the gradients' norm with the learning rate, and fp16's loss scale if it has
    one. Nothing is drawn of a run without a step."""
    from cs336_systems.figures import COLOURS, new_figure, save_figure

    lines = read_metrics(metrics)
    train = [line for line in lines if line["kind"] == "train" and not isinstance(line["loss"], str)]
    validation = [line for line in lines if line["kind"] == "validation" and not isinstance(line["loss"], str)]
    if not train:
        return
    is_scaled = any(line["loss_scale"] is not None for line in train)
    figure, axes = new_figure(columns=3 if is_scaled else 2)
    steps = [line["step"] for line in train]
    loss_axis, norm_axis = axes[0, 0], axes[0, 1]
    loss_axis.plot(steps, [line["loss"] for line in train], color=COLOURS[0], alpha=0.6, linewidth=0.8, label="train")
    if validation:
        at, losses = [line["step"] for line in validation], [line["loss"] for line in validation]
        loss_axis.plot(at, losses, "o-", color=COLOURS[1], markersize=3, label="validation")
    loss_axis.set_ylabel("loss, nats a token")
    norm_axis.plot(steps, [_number(line["gradient_norm"]) for line in train], color=COLOURS[2], linewidth=0.8)
    norm_axis.set_ylabel("norm of all gradients, before clipping")
    norm_axis.set_yscale("log")
    rate_axis = norm_axis.twinx()
    rate_axis.plot(steps, [line["learning_rate"] for line in train], "--", color=COLOURS[3], label="learning rate")
    rate_axis.set_ylabel("learning rate")
    if is_scaled:
        scale_axis = axes[0, 2]
        scale_axis.step(steps, [line["loss_scale"] for line in train], color=COLOURS[4], label="loss scale")
        skipped = [line for line in train if line["is_skipped"]]
        at, scales = [line["step"] for line in skipped], [line["loss_scale"] for line in skipped]
        scale_axis.plot(at, scales, "x", color=COLOURS[6], label="step skipped")
        scale_axis.set_yscale("log", base=2)
    for axis in axes.flat:
        axis.set_xlabel("step")
    for axis in [loss_axis, rate_axis, *axes[0, 2:]]:
        axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _number(value: float | str) -> float:
    return float(value)  # "nan" and "inf" are gaps in a line
