"""The command that a stopped run is told to go on with."""

import pytest

from cs336_systems.resuming import to_go_on


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("python scripts/x.py", "python scripts/x.py --resume"),
        ("python scripts/x.py --size tiny --out 'a b'", "python scripts/x.py --size tiny --out 'a b' --resume"),
        ("python scripts/x.py --resume --size tiny", "python scripts/x.py --resume --size tiny"),
        ("OMP_NUM_THREADS=1 python scripts/x.py", "OMP_NUM_THREADS=1 python scripts/x.py --resume"),
        ("python scripts/x.py --out my--resume", "python scripts/x.py --out my--resume --resume"),
    ],
)
def test_it_is_the_runs_own_and_resumes_once(command, told):
    assert to_go_on(command) == f"To go on: {told}"
    assert to_go_on(command, "from there") == f"To go on from there: {told}"


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}],
)
def test_a_launcher_is_not_in_the_command(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert to_go_on("python x.py") == "To go on, under the same launcher: python x.py --resume"
