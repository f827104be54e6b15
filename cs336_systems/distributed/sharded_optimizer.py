"""Any optimizer with its state divided over the ranks: each rank updates its share of the parameters, and the ranks
exchange what they updated (the optimizer part of ZeRO, Rajbhandari et al. 2020, section 5.1; docs/sharding.md).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.optimizer_checks import (
    ELEMENTWISE,
    check_class,
    check_parameters,
    description,
    without_memory,
)
from cs336_systems.distributed.partition import Slice, divide, fill_buckets, whole
from cs336_systems.distributed.sharded_state import check_state, gather_state, slice_state
from cs336_systems.distributed.updated_bucket import UpdatedBucket

BYTES_PER_MB = 10**6


class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer class; each rank holds the state of, and updates, about 1/world_size of the parameters.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

    Gradients must be the same on all ranks when `step` is called (data parallelism sees to that). All ranks must make
    the same calls in the same order.

    Attributes:
        param_groups: all parameters and options, as in the unsharded optimizer. Options may be changed at any time, by
            hand or by a scheduler; the next step uses them.
        state: this rank's part: the inner optimizer's own entry for a parameter that is whole here, and a dict by
            `Slice` for one that is cut. Parameters that others own have an empty entry.
        inner: the wrapped optimizer, which knows this rank's parameters only.
        slices: each rank's share, a list of `Slice` a rank, alike on all ranks; `Slice.parameter` counts through all
            groups.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_size_mb: float = 256.0,
        cut_parameters: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            params: parameters, (name, parameter) pairs, or dicts of parameter groups with options of their own.
            optimizer_cls: e.g. torch.optim.AdamW; called with groups of parameters and `kwargs`.
            process_group: the ranks that share the state; all ranks if None.
            bucket_size_mb: updated parameters travel in pieces of about this size in MB (10**6 bytes), all ranks'
                parts together. Two of them exist at a time.
            cut_parameters: whether a parameter's rows may have several owners, where the ranks' bytes would otherwise
                differ by more than 1%. By default (None) on a GPU, if the optimizer is one of those that are known to
                treat each element by itself. Not on a CPU: there an element at the end of a tensor is rounded in
                another way (no fused multiply-add), so that the weights would not be exactly the unsharded ones.
            kwargs: the optimizer's options, e.g. lr, weight_decay, foreach, fused.

        Raises:
            RuntimeError: there is no process group.
            ValueError: an optimizer that needs all parameters at once, a parameter listed twice, parameters on several
                devices, parameters that differ between ranks, or what `optimizer_cls` itself refuses: the same on all
                ranks.
        """
        if not dist.is_initialized():
            raise RuntimeError("no process group: make one first, e.g. with cs336_systems.distributed.process_group")
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={bucket_size_mb}: must be more than 0")
        if cut_parameters and optimizer_cls not in ELEMENTWISE:
            raise ValueError(
                f"cut_parameters=True: must not be set for optimizer_cls={optimizer_cls}, which is not known to treat "
                "each element by itself"
            )
        check_class(optimizer_cls)
        group = process_group or dist.group.WORLD
        assert group is not None
        self.process_group: dist.ProcessGroup = group
        self.rank, self.world_size = dist.get_rank(group), group.size()
        self.slices: list[list[Slice]] = [[] for _ in range(self.world_size)]
        self.inner: torch.optim.Optimizer | None = None
        self._make_inner = lambda groups: optimizer_cls(groups, **kwargs)
        self._cut_parameters = cut_parameters
        self._is_elementwise = optimizer_cls in ELEMENTWISE
        self._bucket_bytes = bucket_size_mb * BYTES_PER_MB / self.world_size
        self._loads_bytes = [[0] * self.world_size, [0] * self.world_size]  # of trainable and of frozen parameters
        self._parameters: list[Tensor] = []
        self._expected: list[tuple[Any, ...]] = []  # shape, dtype, device of each
        self._local: dict[Slice, Tensor] = {}  # what the inner optimizer updates
        self._buckets: tuple[tuple[bool, ...], list[UpdatedBucket]] | None = None
        super().__init__(params, kwargs)
        self._build_inner()

    # ---- Parameters and their owners ---------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own, and divide them over the ranks. A collective call.

        Raises:
            ValueError: as at construction; nothing has been added then.
        """
        param_group = dict(param_group)
        if isinstance(param_group["params"], Tensor):
            param_group["params"] = [param_group["params"]]
        param_group["params"] = list(param_group["params"])
        new = [entry[1] if isinstance(entry, tuple) else entry for entry in param_group["params"]]
        check_parameters(new, self._parameters, self.process_group)
        # The class's own checks and defaults, on every rank: a group is refused everywhere or nowhere.
        options = {name: value for name, value in param_group.items() if name not in ("params", "param_names")}
        template = self._make_inner([{**options, "params": [without_memory(parameter) for parameter in new]}])
        defaults = {name: value for name, value in template.param_groups[0].items() if name not in options}
        defaults.pop("params", None)
        super().add_param_group({**defaults, **param_group})
        first = len(self._parameters)
        self._parameters += new
        self._expected += [description(parameter) for parameter in new]
        can_cut = self._cut_parameters
        if can_cut is None:
            can_cut = self._is_elementwise and all(parameter.device.type != "cpu" for parameter in new)
        mine: list[Slice] = []
        for frozen in (False, True):  # each kind in balance by itself, since a frozen parameter has no state
            pieces = [
                whole(first + i, tuple(parameter.shape), parameter.element_size())
                for i, parameter in enumerate(new)
                if parameter.requires_grad != frozen
            ]
            shares = divide(pieces, self._loads_bytes[frozen], can_cut)
            for rank, share in enumerate(shares):
                self.slices[rank] += share
                self._loads_bytes[frozen][rank] += sum(piece.n_bytes for piece in share)
            mine += shares[self.rank]
        for piece in mine:
            parameter = self._parameters[piece.parameter]
            is_cut = piece.n_rows != whole(0, tuple(parameter.shape), 1).n_rows
            # A whole parameter is handed on as itself, with its gradient, hooks and name.
            self._local[piece] = nn.Parameter(self._rows(piece)) if is_cut else parameter
        self._buckets = None
        if self.inner is not None and mine:
            self.inner.add_param_group({**self._options(-1), "params": [self._local[piece] for piece in mine]})

    def _build_inner(self) -> None:
        groups = self._inner_groups(self.slices[self.rank])
        if groups:
            self.inner = self._make_inner(groups)
        else:  # this rank owns nothing, and optimizers refuse to be made of nothing
            parameter = self._parameters[0]
            self.inner = self._make_inner([{**self._options(0), "params": [without_memory(parameter)]}])
            self.inner.param_groups.clear()
            self.inner.state.clear()
        self.defaults = self.inner.defaults  # some schedulers ask there which options there are

    def _options(self, index: int) -> dict[str, Any]:
        return {k: v for k, v in self.param_groups[index].items() if k not in ("params", "param_names")}

    def _inner_groups(self, slices: Iterable[Slice]) -> list[dict[str, Any]]:
        """The inner optimizer's groups of some of this rank's slices: the outer groups' options of this moment."""
        group_of = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        members: dict[int, list[Tensor]] = defaultdict(list)
        for piece in slices:
            members[group_of[piece.parameter]].append(self._local[piece])
        return [{**self._options(index), "params": members[index]} for index in sorted(members)]

    def _rows(self, piece: Slice) -> Tensor:
        """The slice of the parameter itself: a view, or the parameter where it has no rows."""
        parameter = self._parameters[piece.parameter].detach()
        return parameter[piece.start : piece.stop] if parameter.ndim else parameter

    # ---- Step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share and exchange it: afterwards every rank has every updated parameter.

        While a piece travels the next one is updated. On a GPU it queues work and waits for nothing. Returns what
        `closure` returns, which is called once, with gradients enabled.

        Raises:
            ValueError: a parameter's shape, dtype or device is not what it was when it was added, or the optimizer
                changed its own options (it needs all parameters at once to do so).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for i, (parameter, expected) in enumerate(zip(self._parameters, self._expected, strict=True)):
            if description(parameter) != expected:
                raise ValueError(
                    f"parameter {i} was {expected} when the optimizer was made, and is {description(parameter)} now: "
                    "move or cast the module first, and make the optimizer then"
                )
        travelling: deque[UpdatedBucket] = deque()
        for bucket in self._current_buckets():
            self._update(bucket.slices[self.rank])
            if self.world_size > 1:
                bucket.launch()
                travelling.append(bucket)
            if len(travelling) > 1:
                travelling.popleft().finish()
        for bucket in travelling:
            bucket.finish()
        self._show_state()
        return loss

    def _current_buckets(self) -> list[UpdatedBucket]:
        """The buckets of the parameters that are trainable now."""
        trainable = tuple(parameter.requires_grad for parameter in self._parameters)
        if self._buckets is None or self._buckets[0] != trainable:
            shares = [[piece for piece in share if trainable[piece.parameter]] for share in self.slices]
            buckets = fill_buckets(shares, self._bucket_bytes)
            rows = self._rows
            self._buckets = trainable, [UpdatedBucket(slices, rows, self.process_group) for slices in buckets]
        return self._buckets[1]

    def _update(self, slices: list[Slice]) -> None:
        assert self.inner is not None
        cut = [piece for piece in slices if self._local[piece] is not self._parameters[piece.parameter]]
        for piece in cut:
            gradient = self._parameters[piece.parameter].grad
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"parameter {piece.parameter} is cut by rows; its gradient must not be sparse")
            self._local[piece].data = self._rows(piece)
            self._local[piece].grad = None if gradient is None else gradient[piece.start : piece.stop]
        groups = self._inner_groups(slices)
        if not groups:
            return
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self.inner.param_groups = groups
        self.inner.step()
        for group, before in zip(groups, options, strict=True):
            for name, value in before.items():
                if group[name] is not value:
                    raise ValueError(
                        f"optimizer_cls={type(self.inner).__name__}: its step changes its option {name!r}, which "
                        "depends on all parameters at once; such an optimizer can't be sharded"
                    )
        for piece in cut:
            self._local[piece].grad = None

    # ---- State -------------------------------------------------------------------------------------------------------

    def _local_state(self) -> dict[Slice, dict[str, Any]]:
        assert self.inner is not None
        return {piece: self.inner.state[local] for piece, local in self._local.items() if local in self.inner.state}

    def _show_state(self) -> None:
        """`self.state` names every parameter that has been updated, on all ranks alike: whoever asks whether there is
        any state must get the same answer everywhere."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.state.setdefault(parameter, {})
        for piece, state in self._local_state().items():
            parameter = self._parameters[piece.parameter]
            if self._local[piece] is parameter:
                self.state[parameter] = state
            else:
                self.state.setdefault(parameter, {})[piece] = state

    def state_dict(self, to_rank: int | None = None) -> dict[str, Any]:
        """The whole state, as the unsharded optimizer's state_dict has it, with its tensors on the CPU.

        A collective call, which gathers the ranks' parts one tensor at a time.

        Args:
            to_rank: the only rank that gets the state (the others get the groups alone); every rank does if None.
        """
        if to_rank is not None and not 0 <= to_rank < self.world_size:
            raise ValueError(f"to_rank={to_rank}: must be a rank of {self.world_size}, or None")
        state = gather_state(self._local_state(), self._parameters, self.slices, self.process_group, to_rank)
        return {**super().state_dict(), "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state: of `state_dict` at any world size, or of an unsharded optimizer's.

        Every rank must be given the same.

        Raises:
            ValueError: other groups or parameters than this optimizer's.
        """
        check_state(state_dict, self.param_groups, shapes_match=self._is_elementwise)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        assert self.inner is not None
        # Saved states are numbered by group and parameter, as self._parameters is.
        order = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = sorted(self.slices[self.rank], key=lambda piece: piece.parameter)
        groups = self._inner_groups(mine)
        inner_state: dict[int, Any] = {}
        for i, piece in enumerate(mine):  # the inner numbering: groups are in order, and so are the pieces
            state = state_dict["state"].get(order[piece.parameter])
            if state is not None:
                inner_state[i] = slice_state(state, piece, self._parameters[piece.parameter])
        self.inner.param_groups = groups
        if groups:
            numbers = iter(range(len(mine)))
            saved = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
            self.inner.load_state_dict({"state": inner_state, "param_groups": saved})
        self.state = defaultdict(dict)
        for number, parameter in zip(order, self._parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {}
        self._show_state()
