"""How much memory this process may have, and has free: the machine's, or its control groups'."""

from pathlib import Path

import pytest

from cs336_systems.feasibility import machine_memory


def write_groups(root: Path, groups: str, limits: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V1, V2 = "memory.limit_in_bytes", "memory.max"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step", {f"job/{V2}": "5000", f"job/step/{V2}": "7000", V2: "9000"}, 5000),
        ("0::/job/step", {f"job/{V2}": "max", f"job/step/{V2}": "7000"}, 7000),
        ("0::/job/step", {f"job/{V2}": "5000", f"job/step/{V2}": "max", f"other/{V2}": "3"}, 5000),
        ("0::/", {V2: "4000"}, 4000),  # in a container
        ("0::/docker/0123", {V2: "4000"}, 4000),  # the same, with the host's name for the group
        ("0::/../../job", {V2: "4000"}, 4000),
        ("4:cpu,memory:/job/step\n0::/", {f"memory/job/{V1}": "5000", f"memory/job/step/{V1}": "7000"}, 5000),
        ("4:memory:/job\n0::/x", {f"unified/x/{V2}": "6000", f"memory/{V1}": "9223372036854771712"}, 6000),
        ("4:memory:/docker/0123", {f"memory/{V1}": "4000"}, 4000),
        ("4:cpu:/job\n5:memory:/", {f"memory/job/{V1}": "5000", f"memory/{V1}": "8000"}, 8000),
    ],
)
def test_a_control_group_has_what_those_above_it_leave(tmp_path, groups, limits, expected):
    root = write_groups(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in limits.items()})
    assert machine_memory(root) == (expected, expected)


FILES = "anon 1\nactive_file 300\ninactive_file 200\n"
USED = {f"job/{V2}": "5000", "job/memory.current": "3000", "job/memory.stat": FILES}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job", USED, (5000, 2500)),  # files that were read are dropped where memory is short
        ("0::/job", USED | {f"job/{V2}": "max"}, None),
        ("0::/job/step", USED | {f"job/step/{V2}": "2600", "job/step/memory.current": "0"}, (2600, 2500)),
        ("0::/job", USED | {"job/memory.current": "9000"}, (5000, 0)),
        ("0::/job", {f"job/{V2}": "5000"}, (5000, 5000)),  # use is not told
        (
            "4:memory:/job",
            {
                f"memory/job/{V1}": "5000",
                "memory/job/memory.usage_in_bytes": "3000",
                "memory/job/memory.stat": f"{FILES}total_active_file 400\ntotal_inactive_file 500\n",
            },
            (5000, 2900),
        ),
    ],
)
def test_of_a_control_groups_limit_its_use_is_taken(tmp_path, groups, files, expected):
    root = write_groups(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    whole = machine_memory(tmp_path / "nothing").whole
    assert machine_memory(root) == (expected or (whole, whole))


def test_what_the_system_says_is_available_is_free(tmp_path):
    meminfo = "MemTotal:        9000 kB\nMemFree:          100 kB\nMemAvailable:    5000 kB\n"
    root = write_groups(tmp_path, "0::/job", {"proc/meminfo": meminfo})
    assert machine_memory(root) == (machine_memory(tmp_path / "nothing").whole, 5000 * 1024)
    write_groups(root, "0::/job", {f"sys/fs/cgroup/job/{V2}": "90000", "sys/fs/cgroup/job/memory.current": "80000"})
    assert machine_memory(root) == (90_000, 10_000)


def test_without_limits_there_is_the_machines_memory(tmp_path):
    whole = machine_memory(tmp_path)
    assert whole.free == whole.whole
    assert machine_memory(write_groups(tmp_path, "0::/a", {"sys/fs/cgroup/a/memory.max": "max"})) == whole
    assert 2**20 < machine_memory().free <= machine_memory().whole <= whole.whole < 2**63
