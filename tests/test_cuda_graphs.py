"""Steps whose forward and backward are CUDA graphs: the same training, and what can't be recorded is refused."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.benchmarking.model_benchmark import cell_label, measure_cell
from cs336_systems.configs import named_cell
from cs336_systems.cuda_graphs import GraphedPhases
from cs336_systems.workload import Workload

pytestmark = pytest.mark.filterwarnings("error:The CUDA Graph is empty")


def _cell(**parameters):
    parameters = {"device": "cuda", "batch_size": 2, "vocab_size": 50, "cuda_graphs": "on", **parameters}
    return named_cell("tiny", 64, **parameters)


def _unphased(name):
    return nullcontext()


def _losses(cell, steps=5):
    workload = Workload(cell)
    losses = []
    for _ in range(steps):
        workload.step(_unphased)
        losses.append(float(workload.loss))
    return losses


def _losses_of_both(parameters):
    return [_losses(_cell(cuda_graphs=graphs, **parameters)) for graphs in ("on", "off")]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"device": "cpu"}, "cuda_graphs='on': needs a GPU, and device='cpu'"),
        ({"checkpoint_every": 2}, "cuda_graphs='on': goes without checkpoints, .*checkpoint_every=2"),
        ({"cuda_graphs": "maybe"}, "cuda_graphs='maybe': must be one of off, on"),
    ],
)
def test_what_cannot_be_recorded_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        _cell(**parameters)


def test_a_cells_label_tells_of_graphs():
    assert "graphs" in cell_label(_cell())
    assert "graphs" not in cell_label(_cell(cuda_graphs="off"))


@pytest.fixture
def events(monkeypatch):
    """What happens, where graphs are recorded and replayed without a GPU."""
    events = []

    class Graph:
        def replay(self):
            events.append(f"replay {self.name}")

    @contextmanager
    def recording(graph, pool, stream):
        yield
        graph.name = events[-1]  # the part that was computed

    counters = {"reset_peak_memory_stats": lambda device: events.append("reset"), "memory_allocated": lambda device: 3}
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    fakes = {"Stream": lambda device: stream, "stream": nullcontext, "current_stream": lambda device: stream}
    fakes |= {"graph_pool_handle": tuple, "CUDAGraph": Graph, "graph": recording}
    for name, fake in (fakes | counters | {"max_memory_allocated": lambda device: 10}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return events


def test_parts_are_recorded_once_and_replayed_in_their_order(events):
    def compute(phase):
        for name in ("forward", "backward"):
            with phase(name):
                events.append(name)

    def phase(name):
        events.append(f"in {name}")
        return nullcontext()

    step = GraphedPhases(compute, torch.device("cuda"))
    replayed = ["in forward", "replay forward", "in backward", "replay backward"]
    step(phase)
    assert events == ["forward", "backward", "reset", "forward", "backward", "reset", *replayed]
    assert step.bytes_within == 7
    events.clear()
    step(phase)
    assert events == replayed


def test_what_failed_is_recorded_anew(events):
    def compute(phase):
        for name in ("forward", "backward"):
            with phase(name):
                events.append(name)
                if len(events) == 5:  # in the recording: before it the parts ran, and the counters were reset
                    raise RuntimeError("out of memory")

    step = GraphedPhases(compute, torch.device("cuda"))
    with pytest.raises(RuntimeError, match="out of memory"):
        step(_unphased)
    assert not any(event.startswith("replay") for event in events)
    step(_unphased)
    assert events[-2:] == ["replay forward", "replay backward"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"precision": "bf16", "attention": "flash-triton", "kernels": "loss", "compile": "blocks"},
        {"precision": "bf16", "attention": "sdpa", "kernels": "fused", "optimizer": "adamw-fused"},
        {"precision": "fp16", "attention": "flash-triton"},
    ],
    ids=lambda parameters: "-".join(parameters.values()) or "fp32",
)
def test_replayed_steps_train_as_launched_ones_do(parameters):
    # In another process, where annotations are not checked: torch.compile cannot follow that.
    replayed, launched = run_isolated(_losses_of_both, parameters).value
    assert launched[-1] < launched[0] - 0.1  # stale weights or gradients would show
    assert replayed == pytest.approx(launched, rel=1e-5 if not parameters else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "flash-hopper"])
@pytest.mark.parametrize("mode", ["forward", "forward-backward"])
def test_replays_phase_by_phase(mode, attention):
    phases = []

    def phase(name):
        phases.append(name)
        return nullcontext()

    # flash-hopper falls back to the portable kernels where it cannot run.
    workload = Workload(_cell(mode=mode, attention=attention, precision="bf16"))
    workload.step(phase)
    workload.step(phase)
    assert phases == 2 * (["forward"] if mode == "forward" else ["forward", "loss", "backward"])
    if mode == "forward-backward":
        first = [parameter.grad.clone() for parameter in workload.model.parameters()]
        addresses = [parameter.grad.data_ptr() for parameter in workload.model.parameters()]
        workload.inputs.copy_(workload.inputs.roll(1, dims=0))  # another batch, where the graph reads its own
        workload.step(phase)
        assert addresses == [parameter.grad.data_ptr() for parameter in workload.model.parameters()]
        changes = [not torch.equal(a, p.grad) for a, p in zip(first, workload.model.parameters(), strict=True)]
        assert all(changes)


@pytest.mark.gpu
def test_the_peak_counts_the_graphs_memory():
    parameters = {"precision": "fp32", "warmup": 2, "steps": 2, "ctx": 1024, "batch_size": 4}
    cells = [named_cell("small", device="cuda", cuda_graphs=graphs, **parameters) for graphs in ("on", "off")]
    with_graphs, without = (run_isolated(measure_cell, cell).value["peak_memory_gib"] for cell in cells)
    assert with_graphs == pytest.approx(without, rel=0.1)
