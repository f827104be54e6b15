"""An item of the report, and its Markdown: the question, then for each part command, table, picture, origin, answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.benchmarking.report_rows import Sentence, read_rows
from cs336_systems.benchmarking.reproduce_steps import step_named
from cs336_systems.provenance import Provenance

_ROOT = Path(__file__).resolve().parents[2]
Answer = Callable[[Path], Sequence[Sentence | None]]


@dataclass(frozen=True)
class Part:
    """What one folder of results says to an item.

    Args:
        title: a heading.
        folder: of a step of reproduce_steps.py, which is named where there are no rows. A part without one is left out
            where it has no rows.
        files: results files, or patterns of them, for the commands and origins; the part has rows if one of them has.
        tables: made of the results folder, empty where there are no rows for them.
        pictures: what they show, and their path under the results folder, or a pattern of several: two are shown.
        answer: sentences made of the rows.
    """

    title: str
    folder: str | None
    files: tuple[str, ...]
    tables: tuple[Callable[[Path], str], ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()
    answer: Answer = lambda results: ()

    def paths(self, results: Path) -> list[Path]:
        """Those of the files that are there."""
        return [path for pattern in self.files for path in sorted(results.glob(pattern))]


@dataclass(frozen=True)
class Item:
    """One of the assignment's: `names` are those of its problems in the 2025 handout; `fixed` makes what needs no
    rows, of a function from a file of this repository to a link."""

    number: int
    title: str
    names: tuple[str, ...]
    question: str
    parts: tuple[Part, ...] = ()
    fixed: Callable[[Callable[[str], str]], str] = lambda link_to: ""


def item_markdown(item: Item, results: Path, folder: Path) -> str:
    """The item's text, with links from a file in `folder`."""
    names = f" ({', '.join(f'`{name}`' for name in item.names)})" if item.names else ""
    blocks = [
        f"## {item.number}. {item.title}",
        f"**Asked**{names}: {item.question}",
        item.fixed(lambda name: link(_ROOT / name, folder)),
    ]
    for part in item.parts:
        if any(read_rows(path)[0] for path in part.paths(results)):
            blocks += _measured(part, results, folder)
        elif part.folder is not None:
            blocks += [f"### {part.title}", _missing(part.folder)]
    return "\n\n".join(block for block in blocks if block)


def _measured(part: Part, results: Path, folder: Path) -> list[str]:
    paths = part.paths(results)
    runs = [run for path in paths for run in read_rows(path)[1]]
    commands = dict.fromkeys(run.command for run in runs)
    pictures = [block for what, pattern in part.pictures for block in _pictures(what, pattern, results, folder)]
    rows = [f"[{path.name}]({link(path, folder)})" for path in paths]
    origin = "\n".join(f"- {line}" for line in dict.fromkeys(map(_without_command, runs)))
    sentences = " ".join(sentence.text for sentence in part.answer(results) if sentence is not None)
    return [
        f"### {part.title}",
        "```sh\n" + "\n".join(commands) + "\n```",
        *(table(results) for table in part.tables),
        *pictures,
        f"Rows: {', '.join(rows)}, measured on\n\n{origin}",
        f"**Answer.** {sentences}" if sentences else "",
    ]


def _pictures(what: str, pattern: str, results: Path, folder: Path) -> list[str]:
    """The first and the last picture of a pattern, and links to those between."""
    paths = sorted(results.glob(pattern))
    shown = [f"![{what}: {path.stem}]({link(path, folder)})" for path in dict.fromkeys([*paths[:1], *paths[-1:]])]
    if len(paths) > 2:
        shown.append("More: " + ", ".join(f"[{path.stem}]({link(path, folder)})" for path in paths[1:-1]) + ".")
    return shown


def captioned(caption: str, table: Callable[[Path], str]) -> Callable[[Path], str]:
    """The table with a line above it, where there is one."""
    return lambda results: f"{caption}\n\n{text}" if (text := table(results)) else ""


def link(path: Path, folder: Path) -> str:
    """From a file in `folder` to `path`, as Markdown has it."""
    return Path(os.path.relpath(path, folder)).as_posix()


def _without_command(run: Provenance) -> str:
    return run.summary().removesuffix(f"; `{run.command}`")


def _missing(folder: str) -> str:
    """Which commands make the rows that are not there."""
    step = step_named(folder)
    machine = "gpus" if step.needs_ranks else "gpu"
    commands = step.commands(machine, "results") or step.commands("cpu", "results")
    lines = "\n".join(" ".join(["python", *words]) for words in commands)
    only = f"`python scripts/reproduce.py --only {folder}` runs what fits the machine."
    return f"Not measured yet. It runs on {step.needs}; {only} The full size is\n\n```sh\n{lines}\n```"
