"""The metrics file of a training run, and its picture."""

import json
import math
import re

import pytest

from cs336_systems.training.metrics import METRICS, MetricsFile, last_step, plot_metrics, read_metrics
from tests.training_helpers import make_config, train

STEP = {"step": 1, "loss": 0.5, "gradient_norm": "inf", "learning_rate": 1e-3, "loss_scale": None, "is_skipped": False}
STEP |= {"zero_gradient_share": None, "tokens_per_s": 1e4}


def test_metrics_survive_a_cut_last_line_and_drop_what_will_come_again(tmp_path):
    path = tmp_path / METRICS
    with MetricsFile(path) as metrics:
        metrics.write("run", step=0, command="python")
        for step in (1, 2, 3):
            metrics.write("train", **{**STEP, "step": step, "loss": math.nan if step == 3 else 0.5})
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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": ...}, "is no line of metrics (it lacks loss)"),
        ({"step": "abc"}, "step='abc': must be a whole number"),
        ({"loss": [3]}, "loss=[3]: must be a number or one of nan, inf, -inf"),
        ({"kind": 7}, "is no line of metrics (it must be an object of a kind: run, train, validation, event)"),
        ({"kind": []}, "is no line of metrics (it must be an object of a kind: run, train, validation, event)"),
    ],
)
def test_what_a_line_lacks_or_has_of_another_type_is_named(tmp_path, changed, said):
    path = tmp_path / METRICS
    line = {name: value for name, value in {"kind": "train", **STEP, **changed}.items() if value is not ...}
    path.write_text(json.dumps({"kind": "train", **STEP}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: {said}")):
        read_metrics(path)


@pytest.mark.parametrize("bad", [b'{"kind": "tr', b"\xff", b"", b"3", b'{"step": 1}'])
def test_a_bad_line_within_metrics_is_named(tmp_path, bad):
    path = tmp_path / METRICS
    path.write_bytes(b'{"kind": "event", "step": 1}\n' + bad + b'\n{"kind": "event", "step": 1}\n')
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
