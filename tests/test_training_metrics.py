"""The metrics file of a training run, and its picture."""

import math
import re

import pytest

from cs336_systems.training.metrics import METRICS, MetricsFile, last_step, plot_metrics, read_metrics
from tests.training_helpers import make_config, train


def test_metrics_survive_a_cut_last_line_and_drop_what_will_come_again(tmp_path):
    path = tmp_path / METRICS
    with MetricsFile(path) as metrics:
        metrics.write("run", step=0)
        for step in (1, 2, 3):
            metrics.write("train", step=step, loss=math.nan if step == 3 else 0.5)
    assert read_metrics(path)[-1]["loss"] == "nan"
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_metrics(path)) == 4
    assert last_step(path) == 3
    MetricsFile(path, after_step=2).close()
    assert [line.get("step") for line in read_metrics(path)] == [0, 1, 2]
    MetricsFile(path).close()
    assert read_metrics(path) == []
    assert last_step(path) == 0


@pytest.mark.parametrize("bad", [b'{"kind": "tr', b"\xff", b"", b"3", b'{"step": 1}'])
def test_a_bad_line_within_metrics_is_named(tmp_path, bad):
    path = tmp_path / METRICS
    path.write_bytes(b'{"kind": "run"}\n' + bad + b'\n{"kind": "train"}\n')
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}, line 2: is no line of metrics \("):
        read_metrics(path)


def test_a_picture_is_drawn_of_any_run(tmp_path):
    for precision in ("fp32", "fp16"):
        config = make_config(tmp_path, steps=2, precision=precision)
        train(config)
        plot_metrics(config.out / METRICS, tmp_path / f"{precision}.png")
        assert (tmp_path / f"{precision}.png").stat().st_size > 10_000
    MetricsFile(config.out / METRICS).close()
    plot_metrics(config.out / METRICS, tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()
