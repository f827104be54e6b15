"""The multi-rank benchmarks as a person runs them: whatever stops one leaves tables, says why, and can be resumed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from cs336_systems import feasibility, figures
from cs336_systems.benchmarking import rank_sweep
from cs336_systems.benchmarking.all_reduce import AllReduceCell
from cs336_systems.benchmarking.data_parallel import DataParallelCell
from cs336_systems.benchmarking.isolation import Outcome
from cs336_systems.distributed.process_group import GroupOptions
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.files import write_atomically
from cs336_systems.provenance import collect_provenance
from tests.script_helpers import rows_in

TINY = ["--size", "tiny", "--ctx", "8", "--batch-size", "1", "--device", "cpu"]
# Script, its files' name, arguments, and the cells that it measures before those of its own rows.
SCRIPTS = {
    "ddp_benchmark": ("ddp", [*TINY, "--implementation", "naive", "bucketed", "--bucket-size-mb", "1", "2"], 3),
    "fsdp_benchmark": ("fsdp", TINY, 0),
    "sharded_optimizer_benchmark": ("sharded_optimizer", TINY, 0),
    "scaling_benchmark": ("scaling", [*TINY, "--processes", "1", "2", "--implementation", "none", "ddp", "fsdp"], 0),
    "all_reduce_benchmark": ("all_reduce", ["--device", "cpu", "--processes", "2", "--sizes-mb", "1", "2", "4"], 0),
}
KILLED = RankFailedError("rank 1 of 2 was killed by SIGKILL\n\nmore", 1, "", -signal.SIGKILL)


@dataclass
class Ranks:
    """In the place of ranks: every cell has results at once, but the `stop_at`th, where `stop()` happens first."""

    stop_at: int | None = None
    stop: Callable[[], None] = lambda: None
    cells: list[Any] = field(default_factory=list)
    timeouts_s: set[float] = field(default_factory=set)

    def __call__(self, measure: Any, cell: Any, *, world_size: int, options: GroupOptions) -> list[Any]:
        self.cells.append(cell)
        self.timeouts_s.add(options.timeout_s)
        if len(self.cells) - 1 == self.stop_at:
            self.stop()
        if isinstance(cell, AllReduceCell):
            times = dict.fromkeys(("mean_ms", "std_ms", "median_ms", "min_ms", "algorithm_gb_per_s", "bus_gb_per_s"))
            return [{"backend": "gloo", **dict.fromkeys(times, 1.0 + cell.size_mb)}]
        intervals = {"computation": [[0.0, 2.0]], "backward": [[1.0, 2.0]], "communication": [[1.5, 2.5]]}
        step = {"step_median_ms": 10.0, "step_std_ms": 0.1, "tokens_per_s": 800.0, "intervals": intervals}
        if isinstance(cell, DataParallelCell):
            return [{**step, "gradient_mb": 1.0, "n_collectives": 2}]
        return [{**step, "memory": [{"rank": rank, "moment": "after build"} for rank in range(world_size)]}]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    instead = Ranks()
    monkeypatch.setattr(rank_sweep, "run_ranks", instead)
    monkeypatch.setattr(rank_sweep, "resolve_device", lambda device, command, **_: (device, _PROVENANCE, None))

    def save(figure: Any, path: Path) -> None:  # pictures take most of the time; each benchmark's tests draw them
        plt.close(figure)
        write_atomically(path, "picture")

    monkeypatch.setattr(figures, "save_figure", save)
    return instead


_PROVENANCE = collect_provenance("test", "cpu")


def _raise(error: BaseException) -> Callable[[], None]:
    def stop() -> None:
        raise error

    return stop


@pytest.mark.parametrize("script", [*SCRIPTS, "leaderboard_step"])
def test_more_ranks_than_cores_are_told_once(
    script: str,
    ranks: Ranks,
    run_script: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feasibility, "usable_cores", lambda: 2)
    arguments = SCRIPTS[script][1] if script in SCRIPTS else TINY
    for processes, told in ((["2"], []), (["1", "2", "5"], ["5 ranks share the 2 cores that they may use here"])):
        ranks.stop_at, ranks.stop = len(ranks.cells), _raise(KeyboardInterrupt())
        errors = run_script(script, *arguments, "--processes", *processes, "--out", tmp_path)[2]
        assert re.findall(r"(.*), and take turns: their times have that in them\.\n", errors) == told


def test_ranks_that_are_not_known_to_share_cores_are_not_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feasibility, "usable_cores", lambda: 1)
    feasibility.tell_if_crowded("cuda", [8])
    feasibility.tell_if_crowded("cpu", [1])
    feasibility.tell_if_crowded("cpu", [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # a node of torchrun's with one of them
    feasibility.tell_if_crowded("cpu", [8])
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with monkeypatch.context() as slurm:
        for name, value in {"PROCID": "0", "STEP_ID": "0", "STEP_NUM_TASKS": "8", "LOCALID": "0"}.items():
            slurm.setenv(f"SLURM_{name}", value)
        feasibility.tell_if_crowded("cpu", [8])
    assert capsys.readouterr().err == ""
    feasibility.tell_if_crowded("cpu", [8, 2])
    assert capsys.readouterr().err.startswith("8 ranks share the one core that they may use here")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_run_leaves_tables_and_resumes(
    script: str, ranks: Ranks, run_script: Callable[..., Any], tmp_path: Path
) -> None:
    name, arguments, before = SCRIPTS[script]
    out = tmp_path / "out"
    # The last cell is measured, and what lies beside its row may be on disk, but the row is not.
    ranks.stop_at, ranks.stop = before + 1, _raise(KeyboardInterrupt())
    status, output, errors = run_script(script, *arguments, "--out", out)
    assert status == 130
    assert "Interrupted. To go on: test --resume\n" in errors
    assert "Traceback" not in errors
    first = rows_in(out, name)
    assert len(first) == 1
    assert (out / f"{name}.md").read_text() in output
    assert (out / f"{name}.tex").exists()
    if name != "all_reduce":
        assert (out / f"{name}_timeline.png").exists() == (name != "ddp" or "naive" in output)
    n_cells, stopped = len(ranks.cells), ranks.cells[-1]
    ranks.stop_at = None
    status, output, errors = run_script(script, *arguments, "--out", out, "--resume", "--timeout-s", "7")
    assert status == 0, errors
    assert ranks.cells[n_cells] == stopped
    assert len({str(cell) for cell in ranks.cells}) == len(ranks.cells) - 1  # no other is measured twice
    assert ranks.timeouts_s == {600.0, 7.0}
    rows = rows_in(out, name)
    assert rows[: len(first)] == first
    assert len(rows) == len(ranks.cells) - 1 - before
    details = rows_in(out, f"{name}_memory")
    assert len(details) == (0 if name in ("ddp", "all_reduce") else sum(row["world_size"] for row in rows))
    if name != "all_reduce":
        timelines = json.loads((out / f"{name}_timelines.json").read_text())
        assert len(timelines) == sum(row["implementation"] != "none" or name != "ddp" for row in rows)
    assert not list(tmp_path.glob("out/*-2*"))  # nothing was set aside
    assert (out / f"{name}.md").read_text() in output


@pytest.mark.parametrize("script", ["ddp_benchmark", "fsdp_benchmark"])
def test_what_lies_beside_a_row_is_not_doubled(
    script: str, ranks: Ranks, run_script: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed between a cell's details and its own row has the details, and measures the cell again."""
    name, arguments, before = SCRIPTS[script]
    arguments = [*arguments, "--out", str(tmp_path)]
    assert run_script(script, *arguments)[0] == 0
    whole, memory = rows_in(tmp_path, name), rows_in(tmp_path, f"{name}_memory")
    document = json.loads((tmp_path / f"{name}.json").read_text())
    document["rows"].pop()
    (tmp_path / f"{name}.json").write_text(json.dumps(document))
    ranks.cells.clear()
    assert run_script(script, *arguments, "--resume")[0] == 0
    assert len(ranks.cells) == 1
    without_run = [[{**row, "run": 0} for row in rows] for rows in (rows_in(tmp_path, name), whole)]
    assert without_run[0] == without_run[1]
    assert [{**row, "run": 0} for row in rows_in(tmp_path, f"{name}_memory")] == memory
    assert len(rows_in(tmp_path, "all_reduce")) == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_is_a_line_and_status_1(
    script: str, ranks: Ranks, run_script: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    name, arguments, before = SCRIPTS[script]
    ranks.stop_at, ranks.stop = before + 1, lambda: monkeypatch.setattr(os, "fsync", no_space)
    status, _, errors = run_script(script, *arguments, "--out", tmp_path)
    assert status == 1
    told = rf"No space left on device; the 1 row.* in {name}\.json. Make room. To go on: test --resume"
    assert re.search(told, errors)
    assert "Traceback" not in errors
    assert len(rows_in(tmp_path, name)) == 1


@pytest.mark.parametrize("error", [SystemExit(143), RankFailedError("rank 0 of 2 raised KeyError", 0, "", 1)])
def test_sigterm_and_a_rank_s_error_leave_tables_too(
    error: BaseException, ranks: Ranks, run_script: Callable[..., Any], tmp_path: Path, capsys: Any
) -> None:
    ranks.stop_at, ranks.stop = 1, _raise(error)
    if isinstance(error, SystemExit):
        assert run_script("fsdp_benchmark", *TINY, "--out", tmp_path)[0] == 143
    else:
        with pytest.raises(RankFailedError) as failure:
            run_script("fsdp_benchmark", *TINY, "--out", tmp_path)
        (note,) = failure.value.__notes__
        assert note.strip() == f"The 1 rows before are in {tmp_path}/fsdp.json. To go on: test --resume"
    assert {"fsdp.md", "fsdp.csv", "fsdp_timeline.png", "fsdp_memory.md"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_killed_rank_s_reason_is_shown(
    script: str, ranks: Ranks, run_script: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arguments, before = SCRIPTS[script]
    ranks.stop_at, ranks.stop = before + 1, _raise(KILLED)
    status, output, errors = run_script(script, *arguments, "--out", tmp_path / "one")
    reasons = [line for line in output.splitlines() if line.startswith("- ")]
    assert status == 1
    n_cells = len(rows_in(tmp_path / "one", name))
    assert re.search(
        rf"\n1 of {n_cells} cells were killed, and are tried again by --resume: .*\. To go on: test --r", errors
    )
    assert reasons == ["- [1] rank 1 of 2 was killed by SIGKILL"]
    written = (tmp_path / "one" / f"{name}.md").read_text()
    assert (written.count(" killed [1] "), reasons[0] in written) == (1, True)
    ranks.stop_at = None
    status, _, errors = run_script(script, *arguments, "--out", tmp_path / "one", "--resume")
    assert (status, "were killed" in errors, len(rows_in(tmp_path / "one", name))) == (0, False, n_cells)
    killed = Outcome("killed", reason="rank 1 of 2 was killed by SIGKILL")
    monkeypatch.setattr(rank_sweep, "_measure_on_ranks", lambda *_: killed)
    status, output, _ = run_script(script, *arguments, "--out", tmp_path / "all")
    assert status == 1
    lines = [line for line in output.splitlines() if line.startswith("- ")]
    assert len(lines) == 1 + (before > 0)  # those of one reason together
    written = (tmp_path / "all" / f"{name}.md").read_text()
    assert written.count(" killed [1] ") == len(rows_in(tmp_path / "all", name)) > 0
    assert not [path.name for path in (tmp_path / "all").glob("*.png") if "by_ranks" not in path.name]


def test_a_killed_rank_of_the_all_reduces_alone_shows_in_the_status_too(
    ranks: Ranks, run_script: Callable[..., Any], tmp_path: Path
) -> None:
    _, arguments, _ = SCRIPTS["ddp_benchmark"]
    ranks.stop_at, ranks.stop = 0, _raise(KILLED)
    status, _, errors = run_script("ddp_benchmark", *arguments, "--out", tmp_path)
    assert (status, len(rows_in(tmp_path, "ddp"))) == (1, 4)
    assert "\n1 of 3 cells were killed, and are tried again by --resume: 2 ranks, 0.1 MB. To go on: test " in errors


def test_a_run_resumes_only_its_own_workload(ranks: Ranks, run_script: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--device", "cpu", "--implementation", "ddp", "--out", str(tmp_path)]
    assert run_script("fsdp_benchmark", *arguments, "--ctx", 8)[0] == 0
    for changed, message in (
        (["--ctx", 16], "its rows have ctx 8, and this run 16; name another --out"),
        (["--ctx", 8, "--processes", 1, "--batch-size", 3], "its rows have batch_size 4 on 2 ranks"),
        (["--ctx", 8, "--timeout-s", 0.5], "--timeout-s 0.5: must be between 1 and 1000000"),
        (["--ctx", 8, "--timeout-s", 1e7], "--timeout-s 10000000.0: must be between 1 and 1000000"),
    ):
        status, _, errors = run_script("fsdp_benchmark", *arguments, *changed, "--resume")
        assert status == 2
        assert message in errors
    # Strong scaling: half of the eight on each of two, all on one.
    more = ["--ctx", 8, "--processes", 1, "--batch-size", 8, "--resume"]
    status, _, errors = run_script("fsdp_benchmark", *arguments, *more)
    assert status == 0
    assert "Nothing is left" not in errors
    status, _, errors = run_script("fsdp_benchmark", *arguments, *more)
    assert status == 0
    assert f"Nothing is left to measure: every cell has its row in {tmp_path}/fsdp.json." in errors
    (tmp_path / "fsdp_timelines.json").write_text("[1]")
    status, _, errors = run_script("fsdp_benchmark", *arguments, *more)
    assert status == 2
    assert "is not a JSON object" in errors


@pytest.mark.parametrize("value", ["1e30", "1e300", "-1", "0"])
def test_sizes_that_no_buffer_has_are_refused_by_their_flags(
    value: str, run_script: Callable[..., Any], tmp_path: Path
) -> None:
    for script, flag in (("all_reduce_benchmark", "--sizes-mb"), ("ddp_benchmark", "--bucket-size-mb")):
        arguments = [] if script == "all_reduce_benchmark" else ["--size", "tiny"]
        status, _, errors = run_script(script, *arguments, "--device", "cpu", flag, value, "--out", tmp_path / "out")
        assert status == 2
        assert errors.startswith(f"error: {flag} {float(value)}: must be at least one ")
    assert not (tmp_path / "out").exists()
