"""The sharding benchmarks on one rank: optimizer state, gradients and weights divided over the ranks, and whole.

Handout, sharded optimizer and FSDP: memory after the build, before and after the optimizer's step, by what it holds,
beside the formula; the time of a step; PyTorch's own in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from cs336_systems.benchmarking.rank_timing import of_all_ranks, time_phases, time_whole_steps
from cs336_systems.benchmarking.sharding_cells import DIVIDES, MOMENTS, ShardingCell
from cs336_systems.configs import CELL_PARAMETERS, BenchmarkCell


class ShardingStep:
    """A rank's model, optimizer and part of the batch, and its train step, called as `step(phase)`."""

    def __init__(self, context: Any, cell: ShardingCell) -> None:
        import torch

        from cs336_systems.workload import Workload

        self.cell = cell
        # The workload's own optimizer would be the unsharded one.
        parameters = {name: getattr(cell, name) for name in CELL_PARAMETERS}
        parameters |= {"device": str(context.device), "mode": "forward-backward"}
        self.workload = Workload(BenchmarkCell(**parameters))
        self.model, self.optimizer = build(cell, self.workload.model)
        # Each rank's part of the batch is its own; the weights are rank 0's.
        torch.manual_seed(cell.seed + context.rank)
        for tokens in (self.workload.inputs, self.workload.targets):
            tokens.random_(0, cell.vocab_size)

    def __call__(self, phase: Callable[[str], Any]) -> None:
        self.compute_gradients(phase)
        with phase("optimizer"):
            self.optimizer.step()

    def compute_gradients(self, phase: Callable[[str], Any]) -> None:
        """Forward, backward, and the wait for the gradients."""
        from cs336_basics.nn_utils import cross_entropy

        self.optimizer.zero_grad()
        casts_itself = DIVIDES[self.cell.implementation] == "fsdp"
        with phase("forward"), nullcontext() if casts_itself else self.workload.autocast():
            logits = self.model(self.workload.inputs)
        with phase("loss"):
            loss = cross_entropy(logits, self.workload.targets)
        del logits
        with phase("backward"):
            loss.backward()
        with phase("synchronization"):
            if hasattr(self.model, "finish_gradient_synchronization"):
                self.model.finish_gradient_synchronization()


def build(cell: ShardingCell, module: Any) -> tuple[Any, Any]:
    """The module in the cell's implementation, and its optimizer. This is the one place that knows them by name. A
    collective call."""
    import torch

    from cs336_basics.optimizer import AdamW
    from cs336_systems.distributed.ddp_bucketed import BucketedDDP
    from cs336_systems.distributed.fsdp import FullyShardedDataParallel
    from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

    optimizers: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw": (AdamW, {}),
        "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    }
    optimizer_cls, options = optimizers[cell.optimizer]
    compute_dtype = torch.bfloat16 if cell.precision == "bf16" else None
    name = cell.implementation
    if name == "fsdp":
        model = FullyShardedDataParallel(module, compute_dtype)
    elif name == "torch-fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
        for block in module.layers:
            fully_shard(block, mp_policy=policy)
        model = fully_shard(module, mp_policy=policy)
    elif name in ("torch-ddp", "torch-zero"):
        model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    elif name in ("ddp", "sharded-optimizer"):
        model = BucketedDDP(module)
    else:
        model = module
    if name == "sharded-optimizer":
        return model, ShardedOptimizer(model.parameters(), optimizer_cls, **options)
    if name == "torch-zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer_cls, **options)
    return model, optimizer_cls(model.parameters(), **options)


def measure_sharding(
    context: Any, cell: ShardingCell, profile_step: Callable[..., dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Measures the cell on this rank; a collective call, with the same numbers on every rank but what rank 0 profiled.

    `profile_step(step, device)` profiles one step and returns the row's fields that need it, and under "intervals" the
    step's. The result has the row's fields, "intervals", and under "memory" the fields of each rank's memory rows.
    """
    memory = MemoryLog(context, cell)
    step = ShardingStep(context, cell)
    memory.note(step, MOMENTS[0])
    step(nullcontext)  # the optimizer's state is made
    step.compute_gradients(nullcontext)
    memory.note(step, MOMENTS[1])
    step.optimizer.step()
    memory.note(step, MOMENTS[2])

    times, phases_ms = time_whole_steps(context, cell, step), time_phases(context, step)
    profiled = profile_step(step, context.device) if profile_step is not None else {}
    return {
        **times,
        "optimizer_ms": phases_ms["optimizer"],
        "predicted_peak_gib": cell.rank_memory().peak / 2**30,
        "intervals": None,
        **profiled,
        "memory": [row for of_rank in of_all_ranks(memory.rows) for row in of_rank],
    }


class MemoryLog:
    """A rank's memory at the moments of a step, as `ShardingMemoryRow`'s own fields."""

    def __init__(self, context: Any, cell: ShardingCell) -> None:
        self._context = context
        self._formula = cell.rank_memory()
        self.rows: list[dict[str, Any]] = []

    def note(self, step: ShardingStep, moment: str) -> None:
        """Record what is held now."""
        import torch

        device = self._context.device
        parameters = list(step.model.parameters())
        held = {
            "parameters": storage_bytes(parameters),
            "gradients": storage_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer_state": storage_bytes(_tensors(_own_state(step.optimizer))),
        }
        row: dict[str, Any] = {"rank": self._context.rank, "moment": moment}
        row |= {f"{name}_gib": n_bytes / 2**30 for name, n_bytes in held.items()}
        row |= {f"predicted_{name}_gib": getattr(self._formula, name) / 2**30 for name in held}
        if moment == MOMENTS[0]:
            row |= {"predicted_gradients_gib": 0.0, "predicted_optimizer_state_gib": 0.0}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            total = torch.cuda.memory_allocated(device)
            row["total_gib"] = total / 2**30
            row["rest_gib"] = (total - sum(held.values())) / 2**30
            row["peak_since_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        self.rows.append(row)


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of memory behind tensors, this rank's part of DTensors; views into one buffer count it once, and whole."""
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _own_state(optimizer: Any) -> Any:
    """The state that this rank holds: the inner optimizer's where there is one (`inner` here, `optim` in PyTorch's)."""
    inner = getattr(optimizer, "inner", None) or getattr(optimizer, "optim", None)
    return (inner or optimizer).state


def _tensors(values: Any) -> list[Any]:
    import torch

    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values.values() for tensor in _tensors(value)] if hasattr(values, "values") else []
