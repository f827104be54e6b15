"""The look of every picture: colours, a figure without a display, and how it is saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from cs336_systems.files import write_atomically

# One colour a phase or a technique, told apart by colour-blind readers too (Okabe and Ito's palette).
PHASE_COLOURS = {"forward": "#0072B2", "loss": "#56B4E9", "backward": "#D55E00", "optimizer": "#009E73"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#882255")


def new_figure(columns: int = 1, rows: int = 1, width: float = 4.2, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes as a (rows, columns) array, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Writes the picture whole (the ending names the format), labels that stand out of it too, and lets its memory go.
    Raises NotWritten."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=130, bbox_inches="tight")
    plt.close(figure)
    write_atomically(path, content.getvalue())
