"""Reading the allocator's history, on snapshots made by hand: who held what, when, and by which line."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from cs336_systems.profiling.memory_picture import plot_timeline
from cs336_systems.profiling.memory_recording import load_snapshot, save_snapshot
from cs336_systems.profiling.memory_timeline import read_timeline

MODEL = {"filename": "/anywhere/cs336_basics/model.py", "line": 110, "name": "silu"}
LIBRARY = {"filename": "/x/site-packages/torch/nn/functional.py", "line": 5, "name": "linear"}
MARK = {"filename": "/anywhere/cs336_systems/profiling/memory_recording.py", "line": 1, "name": "_allocate_mark"}
CHECKPOINT = {"filename": "/x/site-packages/torch/utils/checkpoint.py", "line": 7, "name": "recompute_fn"}


def alloc(address, size, *frames, label=""):
    entry = {"action": "alloc", "addr": address, "size": size, "stream": 0, "time_us": 0, "frames": list(frames)}
    return entry | ({"user_metadata": label} if label else {})


def free(address, size):
    both = ("free_requested", "free_completed")
    return [{"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0} for action in both]


def mark():
    return [alloc(7, 1, MARK), *free(7, 1)]


def snapshot(events, *, blocks=(), marks=(), held=(), has_backward=True):
    """`events`: entries, or lists of them; `blocks`: (address, size) of what is in use at the end."""
    trace = [entry for event in events for entry in (event if isinstance(event, list) else [event])]
    segment = {
        "address": 1000,
        "total_size": 4096,
        "blocks": [
            {"address": address, "size": 512, "requested_size": size, "state": "active_allocated", "frames": []}
            for address, size in blocks
        ]
        + [{"address": 5000, "size": 512, "state": "inactive", "frames": []}],
    }
    made = {"segments": [segment], "device_traces": [[], trace]}
    if marks:
        made["cs336_systems"] = {"marks": list(marks), "held": list(held), "has_backward": has_backward}
    return made


def held(mark, category, *addresses):
    return {"mark": mark, "category": category, "addresses": list(addresses)}


STEP = ("start", "forward", "loss", "backward", "optimizer", "end")


def a_step():
    """Parameters (100) and a gradient of the step before (100) at first; an activation, temporaries, a new gradient,
    optimizer state made in the first optimizer step, and the loss, which stays."""
    events = [
        mark(),
        free(2, 100),  # zero_grad
        mark(),  # forward
        alloc(3, 40, LIBRARY, MODEL),  # an activation
        alloc(4, 30, MODEL),
        free(4, 30),
        mark(),  # loss
        alloc(5, 4),
        mark(),  # backward
        alloc(6, 25, label="MulBackward0 of cs336_basics/model.py:110 silu"),
        free(6, 25),
        alloc(2, 100),  # the gradient, where the old one was
        free(3, 40),
        mark(),  # optimizer
        alloc(8, 200),
        mark(),
    ]
    notes = [
        held(0, "parameters", 1),
        held(0, "gradients", 2),
        held(5, "parameters", 1),
        held(5, "gradients", 2),
        held(5, "optimizer state", 8),
    ]
    return snapshot(events, blocks=[(1, 100), (2, 100), (5, 4), (8, 200), (9, 16)], marks=STEP, held=notes)


def test_each_allocation_is_what_it_was_noted_to_be_or_what_its_life_says():
    timeline = read_timeline(a_step())
    found = {(a.address, a.start >= 0): (a.category, a.phase, a.size) for a in timeline.allocations}
    assert found == {
        (1, False): ("parameters", "before", 100),
        (2, False): ("gradients", "before", 100),
        (9, False): ("other", "before", 16),
        (3, True): ("activations", "forward", 40),
        (4, True): ("temporaries", "forward", 30),
        (5, True): ("other", "loss", 4),
        (6, True): ("temporaries", "backward", 25),
        (2, True): ("gradients", "backward", 100),
        (8, True): ("optimizer state", "optimizer", 200),
    }


def test_the_series_adds_up_at_every_event():
    timeline = read_timeline(a_step())
    assert timeline.held_at(0) == {
        "parameters": 100,
        "optimizer state": 0,
        "gradients": 100,
        "weight copies": 0,
        "activations": 0,
        "temporaries": 0,
        "other": 16,
    }
    assert timeline.total[-1] == 100 + 100 + 4 + 200 + 16
    for event in range(timeline.n_events + 1):
        live = [a for a in timeline.allocations if a.start < event <= a.end]
        assert timeline.total[event] == sum(a.size for a in live)


def test_peaks_by_phase_and_what_is_kept_for_backward():
    timeline = read_timeline(a_step())
    peaks = {phase.name: int(timeline.total[timeline.peak_event(phase)]) for phase in timeline.phases}
    assert peaks == {
        "before forward": 216,
        "forward": 116 + 70,
        "loss": 116 + 44,
        "backward": 116 + 44 + 100,
        "optimizer": 116 + 4 + 100 + 200,
    }
    assert timeline.phase_at(timeline.peak_event()) == "optimizer"
    assert timeline.kept_for_backward()["activations"] == 40


def test_the_largest_allocations_have_their_lines():
    large = read_timeline(a_step()).largest(10)
    assert [(kind.size, kind.line) for kind in large] == [
        (200, ""),
        (100, ""),
        (40, "cs336_basics/model.py:110 silu"),
        (30, "cs336_basics/model.py:110 silu"),
        (25, "MulBackward0 of cs336_basics/model.py:110 silu"),
        (4, ""),
    ]


def test_equal_allocations_are_counted_together():
    events = [mark(), mark(), *[[alloc(a, 50, MODEL), *free(a, 50)] for a in (3, 4, 3)], mark()]
    (kind,) = read_timeline(snapshot(events, marks=("start", "forward", "end"))).largest(5)
    assert (kind.size, kind.count) == (50, 3)


def test_what_a_repeated_forward_leaves_behind_is_activations():
    again = (MODEL, CHECKPOINT)
    events = [
        *[mark() for _ in range(4)],  # backward has begun
        alloc(3, 10, *again),
        alloc(4, 20, *again),
        free(3, 10),  # within the repeated forward: a temporary
        alloc(5, 30, *again),
        alloc(6, 7, label="MulBackward0"),  # backward goes on
        free(5, 30),
        free(4, 20),
        free(6, 7),
        alloc(3, 10, *again, label="MmBackward0"),  # another segment
        free(3, 10),
        mark(),
    ]
    timeline = read_timeline(snapshot(events, marks=("start", "forward", "loss", "backward", "end")))
    found = [(a.size, a.category) for a in timeline.allocations]
    kept = "activations"
    assert found == [(10, "temporaries"), (20, kept), (30, kept), (7, "temporaries"), (10, kept)]
    assert timeline.allocations[-1].line == "cs336_basics/model.py:110 silu, run again"


def test_a_forward_pass_alone_keeps_nothing():
    events = [mark(), mark(), alloc(3, 40, MODEL), alloc(4, 9), free(3, 40), free(4, 9), mark()]
    timeline = read_timeline(snapshot(events, marks=("start", "forward", "end"), has_backward=False))
    assert {a.category for a in timeline.allocations} == {"temporaries"}
    assert timeline.kept_for_backward() is None


@pytest.mark.parametrize(("has_backward", "category"), [(True, "activations"), (False, "temporaries")])
def test_memory_that_ran_out_in_forward(has_backward, category, tmp_path):
    oom = {"action": "oom", "addr": 123, "size": 999, "stream": 0, "time_us": 0, "device_free": 123, "frames": [MODEL]}
    events = [mark(), mark(), alloc(3, 40, MODEL), alloc(4, 9), free(4, 9), oom]
    notes = [held(0, "parameters", 1), held(-1, "parameters", 1)]
    made = snapshot(
        events, blocks=[(1, 100), (3, 40)], marks=("start", "forward"), held=notes, has_backward=has_backward
    )
    timeline = read_timeline(made)
    assert timeline.oom_bytes == 999
    assert timeline.held_at(timeline.n_events)[category] == 40
    assert [a.category for a in timeline.allocations if a.address == 4] == ["temporaries"]
    plot_timeline(timeline, tmp_path / "oom.png", "a title")
    assert (tmp_path / "oom.png").stat().st_size > 5000


def test_a_snapshot_from_elsewhere_is_one_phase_without_categories():
    timeline = read_timeline(snapshot([alloc(3, 40, MODEL), free(9, 8), free(3, 40)], blocks=[(1, 100)]))
    assert timeline.phases == []
    assert {(a.size, a.category) for a in timeline.allocations} == {
        (40, "temporaries"),
        (8, "other"),
        (100, "other"),
    }
    assert timeline.total[timeline.peak_event()] == 148


def test_blocks_without_addresses_are_placed_one_after_another():
    made = snapshot([alloc(1512, 40, MODEL)])
    made["segments"][0]["blocks"] = [
        {"size": 512, "state": "inactive"},
        {"size": 512, "state": "active_allocated"},
        {"size": 512, "state": "active_allocated"},
    ]
    timeline = read_timeline(made)
    assert {(a.address, a.size) for a in timeline.allocations} == {(1512, 40), (2024, 512)}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"segments": [], "device_traces": [[], []]}, "no history; call torch.cuda.memory._record_memory_history"),
        (snapshot([mark()], marks=("start", "forward")), "must have 2 marks in its history; it has 1"),
    ],
)
def test_a_snapshot_that_lacks_something_says_what(made, message):
    with pytest.raises(ValueError, match=message):
        read_timeline(made)


def test_snapshots_come_back_from_their_file_and_others_are_refused(tmp_path):
    path = tmp_path / "a.pickle"
    save_snapshot(a_step(), path)
    assert read_timeline(load_snapshot(path)).n_events == read_timeline(a_step()).n_events
    for content in (b"no pickle", pickle.dumps({"segments": []}), pickle.dumps([1]), b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"snapshot='.*a\.pickle': must be a file that torch\.cuda\.memory"):
            load_snapshot(path)
    with pytest.raises(ValueError, match="No such file"):
        load_snapshot(tmp_path / "none.pickle")


def test_a_long_history_is_drawn_without_losing_its_peak(tmp_path):
    from cs336_systems.profiling import memory_picture

    total = np.zeros(50_000, dtype=np.int64)
    total[31_234] = 9
    points = memory_picture._points_to_draw(total)
    assert len(points) == 3000
    assert 31_234 in points
    assert (np.diff(points) > 0).all()


def test_a_history_that_a_card_recorded():
    """A forward pass of 2.7b, batch 4, context 128, float32, recorded on an H200; its stacks cut to four frames."""
    file = Path(__file__).parent / "data" / "memory_snapshot.json.gz"
    timeline = read_timeline(json.loads(gzip.decompress(file.read_bytes())))
    assert [phase.name for phase in timeline.phases] == ["before forward", "forward"]
    peak = timeline.held_at(timeline.peak_event())
    assert peak["parameters"] == 4 * 3_406_809_600
    assert peak["activations"] == peak["gradients"] == peak["optimizer state"] == 0
    tokens, ffn = 4 * 128, 10_240
    # At the peak one block's SwiGLU holds three tensors of (tokens, d_ff) and the residual stream's three.
    assert peak["temporaries"] == 4 * tokens * (3 * ffn + 3 * 2560)
    assert timeline.held_at(timeline.n_events)["temporaries"] == 0
    largest = timeline.largest(2)
    assert [kind.size for kind in largest] == [4 * tokens * ffn] * 2
    assert {kind.line.rpartition(" ")[2] for kind in largest} == {"forward", "silu"}
    assert {kind.count for kind in largest} == {64}  # two in each of 32 blocks
