"""What `gluon_simulation.py` runs kernels on: partitions of warps and asynchronous units that take turns at random, and
memory and mbarriers that notice when nothing orders what they do.

A partition is a generator: it yields at every operation that others could notice, and then someone drawn at random goes
on. An actor's speed is drawn as well, from a thousandfold range, so that some runs have a slow TMA, others a consumer
far ahead of its peer. The same seed gives the same run.

Order is known by vector clocks (Mattern 1989): every access to memory has an actor and that actor's time, and every
partition knows up to which time each actor's accesses are over for it. Barriers, waits and atomics pass that on. So a
race is found in any run that contains its two accesses, even where they happened to come in the right order.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

# What a partition yields: None to let others go first, or what it waits for, as a condition and in words.
Wait = tuple[Callable[[], bool], Callable[[], str]] | None
Work = Generator[Wait, None, Any]


class Fault(RuntimeError):
    """What would be wrong, or undefined, on a card."""


def join(mine: "dict[Actor, int]", theirs: "dict[Actor, int]") -> None:
    for actor, time in theirs.items():
        mine[actor] = max(mine.get(actor, 0), time)


class Clocks:
    """Up to which time each actor's accesses are over: as threads see it, and (`fenced`) as asynchronous units do, who
    see what threads wrote after a fence only."""

    def __init__(self) -> None:
        self.seen: dict[Actor, int] = {}
        self.fenced: dict[Actor, int] = {}

    def join(self, other: "Clocks") -> None:
        join(self.seen, other.seen)
        join(self.fenced, other.fenced)


class Program:
    def __init__(self, pid: int) -> None:
        self.pid, self.n_tasks, self.n_tensors = pid, 0, 0
        self.loads: list[Unit] = []


class Actor:
    is_global = False  # whether it accesses global memory, which other programs see

    def __init__(self, machine: "Machine", program: Program, name: str) -> None:
        self.program, self.name = program, name
        self.time = 0  # counts its accesses
        self.speed = 10 ** machine.random.uniform(-1.5, 1.5)


class Unit(Actor):
    """Works beside the partitions: some time, but in order, on what they issue to it."""

    def __init__(self, machine: "Machine", program: Program, name: str) -> None:
        super().__init__(machine, program, name)
        self.queue: deque[Callable[[], Any]] = deque()
        self.unwaited: deque[tuple[int, Any]] = deque()  # the unit's time when it will be over, and what it is
        self.n_before_barrier = 0  # of the queue: what a release by any of the partition's threads waits for
        machine.units.append(self)

    def issue(self, work: Callable[[], Any], what: Any = None) -> None:
        self.queue.append(work)
        self.unwaited.append((self.time, what))

    def work(self) -> None:
        self.n_before_barrier = max(0, self.n_before_barrier - 1)
        self.queue.popleft()()


class Task(Actor):
    """A partition of warps of one program."""

    def __init__(
        self, machine: "Machine", program: Program, function: Callable, args: Sequence, parent: "Task | None" = None
    ) -> None:
        super().__init__(machine, program, f"{function.__name__} {program.n_tasks} of program {program.pid}")
        program.n_tasks += 1
        self.work: Work = function(*args)
        self.wait: Wait = None
        self.clocks = Clocks()
        if parent is not None:
            self.clocks.join(parent.clocks)
        self.products, self.stores, self.writes, self.atomics = [
            Unit(machine, program, f"{what} of {self.name}")
            for what in ("a wgmma", "a TMA store", "the writing of a TMA store", "an atomic")
        ]
        self.writes.is_global = True
        self.polled: Any = None
        machine.tasks.append(self)

    def told(self, unit: Unit, n_left: int) -> list[Any]:
        """It is told that all that was issued to a unit is over, but for the last n_left. Returns what that was."""
        over = [unit.unwaited.popleft() for _ in range(len(unit.unwaited) - n_left)]
        if over:
            self.clocks.seen[unit] = over[-1][0]
        return [what for _, what in over]


Box = tuple[tuple[int, int], ...]  # start and end in each dimension


class Access(NamedTuple):
    box: Box
    is_write: bool
    actor: Actor
    time: int
    where: str


class Memory:
    """A tensor in memory: who has accessed it, as far as it still matters, and the mbarriers in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accesses: list[Access] = []
        self.barriers: dict[int, Barrier] = {}


class Barrier:
    """An mbarrier. Waits see the parity of the phase that is under way, and no more."""

    def __init__(self, machine: "Machine", program: Program, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.phase, self.missing, self.missing_bytes = 0, count, 0
        self.arriving, self.completed = Clocks(), Clocks()
        self.loads = Unit(machine, program, f"a TMA load for {name}")
        program.loads.append(self.loads)

    def __str__(self) -> str:
        return f"{self.name}, in phase {self.phase}, which lacks {self.missing} arrivals, {self.missing_bytes} bytes"

    def arrive(self, clocks: Clocks, count: int, n_bytes: int = 0) -> None:
        self.arriving.join(clocks)
        self.missing -= count
        self.missing_bytes += n_bytes
        if self.missing < 0:
            raise Fault(f"more arrivals than the {self.count} of a phase: {self}")
        if self.missing == 0 and self.missing_bytes == 0:
            self.phase += 1
            self.missing = self.count
            self.completed.join(self.arriving)
            self.arriving = Clocks()


class Machine:
    current: Task  # whose turn it is

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self.units: list[Unit] = []
        self.published: dict[
            Any, dict[Actor, int]
        ] = {}  # by the address of an atomic: what its releases let others know

    def run(self, function: Callable[..., Work], args: Sequence, n_programs: int, n_resident: int) -> None:
        """Run programs 0 … n_programs - 1, at most n_resident at a time; later ones start as earlier ones end."""
        programs = (Task(self, Program(pid), function, args) for pid in range(n_programs))
        for _ in range(n_resident):
            next(programs, None)
        while True:
            ready: list[Any] = [task for task in self.tasks if task.wait is None or task.wait[0]()]
            ready += [unit for unit in self.units if unit.queue]
            if not ready:
                break
            (chosen,) = self.random.choices(ready, [actor.speed for actor in ready])
            if isinstance(chosen, Task):
                self._go_on(chosen, programs)
            else:
                chosen.work()
        if self.tasks:
            raise Fault(
                "deadlock: " + "; ".join(f"{x.name} waits for {x.wait[1]()}, in {where(x)}" for x in self.tasks)
            )

    def _go_on(self, task: Task, programs: Iterator[Task]) -> None:
        self.current = task
        try:
            task.wait = next(task.work)
        except StopIteration:
            self.tasks.remove(task)
            program = task.program
            is_last = all(other.program is not program for other in self.tasks)
            for unit in [task.products, task.stores, *(program.loads if is_last else ())]:
                if unit.queue or unit.unwaited:
                    raise Fault(f"{task.name} ends, and {unit.name} has not been waited for") from None
            if is_last:
                self.units = [unit for unit in self.units if unit.queue or unit.program is not program]
                next(programs, None)

    def access(self, memory: Memory, box: Box, is_write: bool, unit: Unit | None = None) -> None:
        """The current partition accesses a part of a tensor, itself or by a unit that it sends."""
        known, kept = self.current.clocks, []
        actor = self.current if unit is None else unit
        for old in memory.accesses:
            pairs = list(zip(box, old.box, strict=True))
            if all(a < d and c < b for (a, b), (c, d) in pairs) and (is_write or old.is_write):
                now = f"{actor.name} {'writes' if is_write else 'reads'} {memory.name}"
                before = f"what {old.actor.name} {'wrote' if old.is_write else 'read'} in {old.where}"
                if known.seen.get(old.actor, 0) < old.time:
                    raise Fault(f"{now}, and nothing puts that after {before}")
                is_by_thread = old.is_write and isinstance(old.actor, Task)
                if unit is not None and is_by_thread and known.fenced.get(old.actor, 0) < old.time:
                    raise Fault(f"{now}, and there is no fence_async_shared after {before}")
            is_covered = all(a <= c and d <= b for (a, b), (c, d) in pairs)
            if not (is_covered and (is_write or (old.actor is actor and not old.is_write))):
                kept.append(old)
        actor.time += 1
        memory.accesses = [*kept, Access(box, is_write, actor, actor.time, where(self.current))]
        if unit is None:
            known.seen[actor] = actor.time


def where(task: Task) -> str:
    """The lines of the simulated kernel that a partition is in, outermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # those that run, innermost first
        frames.insert(0, frame)
        frame = frame.f_back
    work: Any = task.work
    if not work.gi_running:  # those that wait, outermost first
        frames.clear()
        while isinstance(work, Generator):
            frames.append(work.gi_frame)
            work = work.gi_yieldfrom
    return " > ".join(f"{x.f_code.co_name}:{x.f_lineno}" for x in frames if "__simulated__" in x.f_globals)
