"""What one Transformer block keeps for backward, tensor by tensor, and what backward allocates in exchange.

The tensors are read off autograd's graph itself, so that operations are named as autograd names them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.accounting.memory import block_saved_tensors
from cs336_systems.configs import BenchmarkCell
from cs336_systems.profiling.autograd_nodes import forward_line, forward_lines_kept, graph_nodes
from cs336_systems.profiling.storage_trace import StorageTrace
from cs336_systems.records import ResultsFile
from cs336_systems.weight_copies import WeightCopies
from cs336_systems.workload import Workload

MIB = 2**20


@dataclass
class SavedTensor:
    """One storage that the graph keeps: a tensor of it, its bytes, what it is, and which nodes keep it as what.

    `kind` is "activation", "weight copy" (in autocast's precision), "parameter" or "buffer". An entry of `kept_by` is
    e.g. "MulBackward0.self"; `line` is the forward line of the first of them.
    """

    shape: tuple[int, ...]
    dtype: str
    n_bytes: int
    kind: str
    kept_by: list[str]
    line: str


@dataclass(frozen=True)
class BlockRow(BenchmarkCell):
    """A block's memory between its forward and its backward, in MiB, each storage once; by formula beside it.

    `activations_mib` includes the block's input. `largest_five_share` is the five largest activations' part of it.
    `gradients_mib` are those that backward leaves, the input's included, and `backward_peak_mib` is the most that is
    held during backward beyond what was there when it began (None in compiled code on a CPU, which cannot be watched).
    """

    status: str = "ok"
    reason: str = ""
    activations_mib: float | None = None
    predicted_mib: float | None = None
    weight_copies_mib: float | None = None
    parameters_mib: float | None = None
    n_activations: int | None = None
    largest_five_share: float | None = None
    gradients_mib: float | None = None
    backward_peak_mib: float | None = None


@dataclass(frozen=True)
class SavedTensorRow(BenchmarkCell):
    """One tensor that a block keeps; of those alike in all columns, `count`."""

    rank: int = 0
    kind: str = ""
    shape: str = ""
    dtype: str = ""
    mib: float = 0.0
    count: int = 1
    kept_by: str = ""
    line: str = ""


def saved_tensors(
    output: Float[Tensor, "*shape"],
    parameters: Sequence[Tensor] = (),
    buffers: Sequence[Tensor] = (),
    copies: frozenset[int] | set[int] = frozenset(),
) -> list[SavedTensor]:
    """All tensors that the graph behind `output` keeps, largest first; a storage that many nodes keep is one of them.

    Args:
        output: a tensor with a `grad_fn`; backward must not have run.
        parameters, buffers: tensors whose storages are such.
        copies: addresses of weights' copies, of `WeightCopies.addresses()`.

    Raises:
        ValueError: `output` has no graph.
    """
    if output.grad_fn is None:
        raise ValueError(f"output={tuple(output.shape)}: must have a grad_fn; the forward pass ran without autograd")
    kinds = dict.fromkeys(copies, "weight copy")
    for kind, tensors in (("buffer", buffers), ("parameter", parameters)):
        kinds |= dict.fromkeys((tensor.untyped_storage().data_ptr() for tensor in tensors), kind)
    found: dict[int, SavedTensor] = {}
    for node in graph_nodes(output.grad_fn):
        for name, tensor in _kept_by(node):
            storage = tensor.untyped_storage()
            keeper = f"{node.name()}.{name}"
            known = found.setdefault(
                storage._cdata,
                SavedTensor(
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    n_bytes=storage.nbytes(),
                    kind=kinds.get(storage.data_ptr(), "activation"),
                    kept_by=[],
                    line=forward_line(node),
                ),
            )
            if keeper not in known.kept_by:
                known.kept_by.append(keeper)
    return sorted(found.values(), key=lambda saved: -saved.n_bytes)


def _kept_by(node: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a node keeps and their names: attributes of PyTorch's own nodes, a tuple of a Function's."""
    if hasattr(node, "saved_tensors"):  # an autograd.Function, torch.compile's included
        named = [("saved_tensors", node.saved_tensors)]
    else:
        names = [name for name in dir(node) if name.startswith("_saved_")]
        named = [(name.removeprefix("_saved_"), getattr(node, name)) for name in names]
    for name, value in named:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            # A Python number that an operation was given is kept too, as a scalar tensor.
            if isinstance(tensor, Tensor) and not (tensor.ndim == 0 and tensor.dtype in (torch.float64, torch.int64)):
                yield name, tensor


def measure_block(cell: BenchmarkCell) -> dict[str, Any]:
    """One block of the cell's model: `BlockRow`'s results, and under "tensors" those of its `SavedTensorRow`s.

    With `compile` other than "off" the block is compiled. Meant for a fresh process.
    """
    workload = Workload(cell)
    block, device = workload.model.layers[0], workload.device
    gc.collect()
    x = torch.randn(cell.batch_size, cell.ctx, cell.d_model, device=device, requires_grad=True)
    is_eager = cell.compile == "off"
    if not is_eager or device.type == "cuda":  # what is made once: the compiled code, and libraries' workspaces
        with workload.autocast():
            warm = block(x)
        warm.sum().backward()
        del warm
        x.grad = None
        block.zero_grad(set_to_none=True)
    copies = WeightCopies(list(block.parameters()))
    with (
        workload.autocast(),
        forward_lines_kept() if is_eager else nullcontext(),
        copies if is_eager else nullcontext(),
    ):
        output = block(x)
    held = copies.addresses() if is_eager else _copies_by_value(output, block, workload)
    tensors = saved_tensors(output, list(block.parameters()), list(block.buffers()), held)
    size = {
        kind: sum(saved.n_bytes for saved in tensors if saved.kind == kind)
        for kind in ("activation", "weight copy", "parameter")
    }
    activations = [saved for saved in tensors if saved.kind == "activation"]
    shape = (cell.model_config(), cell.batch_size, cell.ctx)
    predicted = sum(block_saved_tensors(*shape, cell.precision, cell.attention).values()) if is_eager else None
    results = {
        "activations_mib": size["activation"] / MIB,
        "predicted_mib": predicted and predicted / MIB,
        "weight_copies_mib": size["weight copy"] / MIB,
        "parameters_mib": size["parameter"] / MIB,
        "n_activations": len(activations),
        "largest_five_share": sum(saved.n_bytes for saved in activations[:5]) / size["activation"],
        "backward_peak_mib": _backward_peak(output, x, is_eager),
        "tensors": _rows(tensors),
    }
    gradients = [x.grad, *(parameter.grad for parameter in block.parameters())]
    results["gradients_mib"] = sum(gradient.nbytes for gradient in gradients if gradient is not None) / MIB
    return results


def _copies_by_value(output: Tensor, block: torch.nn.Module, workload: Workload) -> set[int]:
    """Addresses of the weights' copies that compiled code keeps: what equals a weight in the precision that it has."""
    assert output.grad_fn is not None
    matrices = [parameter for parameter in block.parameters() if parameter.ndim == 2]
    weights = [weight for matrix in matrices for weight in (matrix, matrix.T)]
    return {
        tensor.untyped_storage().data_ptr()
        for node in graph_nodes(output.grad_fn)
        for _, tensor in _kept_by(node)
        if workload.cell.precision in ("bf16", "fp16") and tensor.dtype in (torch.bfloat16, torch.float16)
        if any(weight.shape == tensor.shape and torch.equal(weight.to(tensor.dtype), tensor) for weight in weights)
    }


def _backward_peak(output: Tensor, x: Tensor, is_eager: bool) -> float | None:
    """Runs backward; the most MiB held during it beyond what was held when it began."""
    gradient = torch.ones_like(output)
    if output.device.type == "cuda":
        before = torch.cuda.memory_allocated(output.device)
        torch.cuda.reset_peak_memory_stats(output.device)
        output.backward(gradient)
        return (torch.cuda.max_memory_allocated(output.device) - before) / MIB
    if not is_eager:
        output.backward(gradient)
        return None
    assert output.grad_fn is not None
    kept = [tensor for node in graph_nodes(output.grad_fn) for _, tensor in _kept_by(node)]
    trace = StorageTrace([*kept, output, x, gradient], has_stacks=False)
    del kept
    before = trace.live_bytes
    with trace:
        output.backward(gradient)
    return (trace.peak_bytes - before) / MIB


def _rows(tensors: Sequence[SavedTensor]) -> list[dict[str, Any]]:
    alike: dict[tuple, int] = {}
    for saved in tensors:
        shape = " × ".join(map(str, saved.shape)) or "scalar"
        key = (saved.kind, shape, saved.dtype, saved.n_bytes / MIB, ", ".join(saved.kept_by), saved.line)
        alike[key] = alike.get(key, 0) + 1
    names = ("kind", "shape", "dtype", "mib", "kept_by", "line")
    return [
        {"rank": rank, "count": count, **dict(zip(names, key, strict=True))}
        for rank, (key, count) in enumerate(alike.items(), start=1)
    ]


BLOCK_COLUMNS = {
    "size": "size",
    "ctx": "ctx",
    "precision": "precision",
    "attention": "attention",
    "compile": "compile",
    "status": "status",
    "activations_mib": "activations MiB",
    "predicted_mib": "predicted activations MiB",
    "n_activations": "tensors",
    "largest_five_share": "the five largest's share",
    "weight_copies_mib": "weight copies MiB",
    "parameters_mib": "parameters MiB",
    "gradients_mib": "gradients after backward MiB",
    "backward_peak_mib": "at most during backward MiB more",
}
TENSOR_COLUMNS = {
    "ctx": "ctx",
    "precision": "precision",
    "attention": "attention",
    "compile": "compile",
    "rank": "",
    "kind": "kind",
    "shape": "shape",
    "dtype": "dtype",
    "mib": "MiB",
    "count": "of them",
    "kept_by": "kept by",
    "line": "made for",
}


def write_files(blocks: ResultsFile, tensors: ResultsFile) -> str:
    """Writes the tables of both files and returns what a person reads."""
    varied = ("attention", "compile")
    hidden = {name for name in varied if len({getattr(row, name) for row in blocks.rows}) == 1}
    tables = [
        results.write_tables({name: heading for name, heading in columns.items() if name not in hidden})
        for results, columns in ((blocks, BLOCK_COLUMNS), (tensors, TENSOR_COLUMNS))
    ]
    return "\n".join(table for table in tables if table)
