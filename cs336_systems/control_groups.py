"""Where the system says what a process may use: its control group's folders, and those of the groups above it."""

from __future__ import annotations

from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> list[tuple[Path, int]]:
    """The folders of control groups, each with its version (2, beside version 1, and 1 of the `controller`, e.g.
    "memory"): this process's group and those above it, whether they are there or not. A container sees its own group's
    at the top, under whatever name the host knows it by. Under `root` are proc and sys."""
    try:
        # "0::/a/b" of version 2, "4:cpu,memory:/a/b" of version 1.
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    groups = {controller if controller in names.split(",") else names: group for _, names, group in lines}
    found = []
    for mount, name, version in (
        ("sys/fs/cgroup", "", 2),
        ("sys/fs/cgroup/unified", "", 2),
        (f"sys/fs/cgroup/{controller}", controller, 1),
    ):
        own = Path(groups.get(name, "/").lstrip("/"))
        found += [(root / mount / group, version) for group in (own, *own.parents) if ".." not in group.parts]
    return found
