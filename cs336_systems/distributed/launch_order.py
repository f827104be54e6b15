"""When to launch: as early as possible, and in the same order on every rank.

Collectives match by the order in which each rank launches them. Gradients become ready in an order that may differ
between ranks (a branch of the model that one rank's batch skips), so the order of launching is fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence


class LaunchOrder:
    """Portions 0, 1, … of parameters, of which portion i is to be launched as soon as all its parameters are ready and
    all portions before it have been launched; `rest` is what is left, ready or not.

    For example, with portions [[2], [1, 0]]: parameters 1 and 0 become ready and there is nothing to launch; parameter
    2 becomes ready, and portions 0 and 1 are.
    """

    def __init__(self, portions: Sequence[Sequence[int]]) -> None:
        """`portions[i]` are portion i's parameters, each in one portion only."""
        self._portions = [list(portion) for portion in portions]
        self._portion_of = {parameter: i for i, portion in enumerate(self._portions) for parameter in portion}
        self.reset()

    def reset(self) -> None:
        """Begin a new backward pass: nothing is ready, nothing launched."""
        self._ready: set[int] = set()
        self._n_waiting = [len(portion) for portion in self._portions]
        self._next = 0

    def is_ready(self, parameter: int) -> bool:
        """Whether the parameter was marked since the last reset."""
        return parameter in self._ready

    def mark_ready(self, parameter: int) -> range:
        """Note, once, that this parameter's gradient is complete; returns the portions to launch now, in order."""
        self._ready.add(parameter)
        self._n_waiting[self._portion_of[parameter]] -= 1
        first = self._next
        while self._next < len(self._portions) and self._n_waiting[self._next] == 0:
            self._next += 1
        return range(first, self._next)

    def rest(self) -> range:
        """The portions that were not to be launched before, and are now."""
        first, self._next = self._next, len(self._portions)
        return range(first, self._next)
