"""The end-to-end benchmark in low precision beside float32, and what the low precision's copies of weights take.

Under autocast a weight's low-precision copy may be held twice over: by autocast's cache until the autocast region ends,
and by the graph until backward has used it. Neither is an activation, so that both are counted apart from those.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting.memory import autocast_weight_bytes, saved_activation_bytes
from cs336_systems.accounting.training_memory import training_memory
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow, measure_cell
from cs336_systems.configs import BenchmarkCell
from cs336_systems.reasons import measured_first
from cs336_systems.records import format_value

if TYPE_CHECKING:
    import torch

    from cs336_systems.workload import Workload


@dataclass(frozen=True)
class PrecisionRow(BenchmarkRow):
    """A benchmark row, and between forward and backward of one eager step what is held, in GiB (None if compiled).

    `weight_copies_gib`: low-precision copies of weights that backward keeps. `weight_cache_gib`: those that autocast's
    cache alone still holds when forward has ended, and lets go with the region. `activations_gib`: all else that is
    kept for backward, each storage once, as autograd saves it. `requested_gib`: by how much what is asked of the GPU's
    allocator has grown over forward and loss, which should be copies and activations; `allocated_gib`: what it hands
    out for that, which is more, as it leaves up to 1 MiB of a cached block unsplit. `*_predicted_gib` are the formulas
    of cs336_systems.accounting for the same.
    """

    samples_per_s: float | None = None
    weight_copies_gib: float | None = None
    weight_copies_predicted_gib: float | None = None
    weight_cache_gib: float | None = None
    activations_gib: float | None = None
    activations_predicted_gib: float | None = None
    requested_gib: float | None = None
    allocated_gib: float | None = None
    peak_predicted_gib: float | None = None


def measure_precision_cell(cell: BenchmarkCell) -> dict[str, Any]:
    """The benchmark's results for the cell, and its memory by kind. Meant for a fresh process."""
    from cs336_systems.workload import Workload

    results = measure_cell(cell)
    results["samples_per_s"] = cell.batch_size / results["step_median_ms"] * 1e3
    if cell.compile != "off":
        return results
    gc.collect()
    kept = measure_kept(Workload(cell))
    config = cell.model_config()
    if cell.mode != "forward":
        shape = (config, cell.batch_size, cell.ctx, cell.precision, cell.attention)
        kept |= {
            "weight_copies_predicted": autocast_weight_bytes(config, cell.precision),
            "activations_predicted": saved_activation_bytes(*shape),
        }
    if cell.mode == "train-step":
        kept["peak_predicted"] = training_memory(*shape).peak
    return results | {f"{name}_gib": count / 2**30 for name, count in kept.items()}


def measure_kept(workload: Workload) -> dict[str, int]:
    """Bytes held between forward (with the loss) and backward, by kind, in one step of an eager workload.

    Returns:
        "weight_copies" and "weight_cache", and if the step has a backward pass "activations" and, on a GPU,
        "requested" and "allocated"; see `PrecisionRow`.
    """
    import torch

    from cs336_systems.weight_copies import WeightCopies

    workload.step(_silent)  # a GPU's libraries make their workspaces in a first step, and keep them
    workload.loss = None
    workload.model.zero_grad(set_to_none=True)
    model = workload.model
    copies = WeightCopies(list(model.parameters()))
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    known |= {tensor.untyped_storage().data_ptr() for tensor in (workload.inputs, workload.targets)}
    saved: dict[int, int] = {}
    found: dict[str, int] = {}

    def note_saved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def held() -> dict[str, int]:
        on_gpu = workload.device.type == "cuda"
        statistics = torch.cuda.memory_stats(workload.device) if on_gpu else {}
        names = ("requested", "allocated") if on_gpu else ()
        return {name: statistics[f"{name}_bytes.all.current"] for name in names}

    before = held()

    @contextmanager
    def phase(name: str) -> Generator[None]:
        if name == "backward":
            copied = copies.addresses()
            found["activations"] = sum(size for address, size in saved.items() if address not in copied)
            found.update({name: count - before[name] for name, count in held().items()})
        with ExitStack() as watching:
            if name in ("forward", "loss"):
                watching.enter_context(copies)
                watching.enter_context(torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor))
            yield
        if name == "forward":  # the step has left its autocast region by now
            found["weight_copies"] = copies.bytes_held()
            found["weight_cache"] = inside[0] - found["weight_copies"]

    inside: list[int] = []
    handle = model.register_forward_hook(lambda module, args, output: inside.append(copies.bytes_held()))
    workload.step(phase)
    handle.remove()
    return found


@contextmanager
def _silent(name: str) -> Generator[None]:
    yield


PRECISION_COLUMNS = {
    "samples_per_s": "samples/s",
    "weight_copies_gib": "weight copies GiB",
    "weight_copies_predicted_gib": "predicted weight copies GiB",
    "weight_cache_gib": "of autocast's cache alone GiB",
    "activations_gib": "activations GiB",
    "activations_predicted_gib": "predicted activations GiB",
    "requested_gib": "requested GiB",
    "allocated_gib": "allocated GiB",
    "peak_predicted_gib": "predicted peak GiB",
}


def precision_columns(rows: Sequence[PrecisionRow], columns: dict[str, str]) -> dict[str, str]:
    """The benchmark's `columns` and those of `PRECISION_COLUMNS` that some row has."""
    return columns | {
        name: heading for name, heading in PRECISION_COLUMNS.items() if any(getattr(r, name) is not None for r in rows)
    }


def speedup_table(rows: Sequence[PrecisionRow]) -> str:
    """A Markdown table of the median step and the peak memory in each precision, as multiples of fp32's."""
    precisions = [name for name in dict.fromkeys(row.precision for row in rows) if name != "fp32"]
    others = [name for name in BenchmarkCell.__dataclass_fields__ if name != "precision"]
    shown = ["size", "ctx", *(name for name in ("mode", "attention", "compile", "optimizer") if _varies(rows, name))]

    def key(row: PrecisionRow) -> tuple:
        return tuple(getattr(row, name) for name in others)

    by_cell = {(key(row), row.precision): row for row in rows}
    lines = []
    for base in (row for row in measured_first(rows) if row.precision == "fp32"):
        cells = [*(str(getattr(base, name)) for name in shown), _step(base)]
        for precision in precisions:
            row = by_cell.get((key(base), precision))
            cells += [_step(row), _ratio(base, row, _inverse), _ratio(base, row, _memory)]
        lines.append(cells)
    if not lines or not precisions:
        return ""
    headings = [*shown, "fp32 step ms"]
    for precision in precisions:
        headings += [f"{precision} step ms", "times as fast", "times the memory"]
    table = [headings, [":--", *["--:"] * (len(headings) - 1)], *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _varies(rows: Sequence[PrecisionRow], name: str) -> bool:
    return len({getattr(row, name) for row in rows}) > 1


def _step(row: PrecisionRow | None) -> str:
    return format_value(None) if row is None else row.status if row.status != "ok" else format_value(row.step_median_ms)


def _inverse(row: PrecisionRow) -> float:
    return 1 / (row.step_median_ms or float("nan"))


def _memory(row: PrecisionRow) -> float:
    return row.peak_memory_gib or float("nan")


def _ratio(base: PrecisionRow, row: PrecisionRow | None, of: Callable[[PrecisionRow], float]) -> str:
    if row is None or row.status != "ok" or base.status != "ok":
        return format_value(None)
    return f"{of(row) / of(base):.2f}"


def cache_note(rows: Sequence[PrecisionRow]) -> str:
    """In words: where the weights' copies were."""
    cached = [row for row in rows if row.weight_cache_gib is not None and row.precision in ("bf16", "fp16")]
    if not cached:
        return ""
    if max(row.weight_cache_gib or 0 for row in cached) == 0:
        return (
            "Autocast's cache held none of the weights' copies by itself: it caches casts of leaf tensors only, and "
            "the model's `x @ weight.T` hands it a view. The copies counted here are those that backward keeps."
        )
    return "Copies of autocast's cache alone go when its region ends; the others stay until backward has used them."
