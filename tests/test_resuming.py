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
        ("torchrun --nproc-per-node 2 scripts/x.py", "torchrun --nproc-per-node 2 scripts/x.py --resume"),
        ("python scripts/x.py --out my--resume", "python scripts/x.py --out my--resume --resume"),
    ],
)
def test_it_is_the_runs_own_and_resumes_once(command, told):
    assert to_go_on(command) == f"To go on: {told}"
    assert to_go_on(command, "from there") == f"To go on from there: {told}"
