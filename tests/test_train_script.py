"""scripts/train.py as a person runs it: what it leaves, SIGKILL and resume, Ctrl-C, and what it refuses."""

import dataclasses
import errno
import fcntl
import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cs336_systems import feasibility
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.files import NotWritten
from cs336_systems.signals import IN_SUCCESSION_S, STOPPED
from cs336_systems.training import checkpoints, loop, run
from cs336_systems.training.checkpoints import list_checkpoints
from cs336_systems.training.config import TrainArguments
from cs336_systems.training.metrics import METRICS, PLOT, read_metrics
from cs336_systems.training.run import run_training
from tests.script_helpers import ScriptProcess, forked_processes, run_without_torch, wait_until
from tests.training_helpers import lines, make_config, train, write_text


def _arguments(config):
    """The command line of a config."""
    arguments = []
    for field in dataclasses.fields(TrainArguments):
        value = getattr(config, field.name)
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", str(value)]
    return arguments


def test_a_run_leaves_metrics_a_picture_and_checkpoints(tmp_path, capsys):
    config = make_config(tmp_path)
    summary = run_training("python scripts/train.py", config)
    assert {path.name for path in config.out.iterdir()} == {
        METRICS,
        PLOT,
        *(f"checkpoint-{step:08d}.{kind}" for step in (6, 8) for kind in ("pt", "json")),
    }
    printed = capsys.readouterr()
    assert printed.out.startswith(f"8 steps: validation loss {summary.validation_loss:.4f}; ")
    assert "loss=" in printed.err
    assert "tok/s=" in printed.err
    (run,) = lines(config, "run")
    assert run["command"].endswith("python scripts/train.py")
    assert run["config"]["learning_rate"] == config.learning_rate
    assert [line["step"] for line in lines(config, "train")] == list(range(1, 9))
    assert [line["step"] for line in lines(config, "validation")] == [4, 8]


def test_a_standard_error_that_takes_nothing_stops_no_run(tmp_path, monkeypatch):
    """A log on a full disk, or one that its reader has left."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert run_training("python scripts/train.py", make_config(tmp_path)).status == "finished"
        monkeypatch.undo()
        with suppress(OSError):  # what is left in its buffer
            full.close()


def test_a_full_disk_is_told_with_the_checkpoint_to_go_on_from(tmp_path, monkeypatch, capsys):
    """As torch.save tells it: its own writer fails in turn, and hides why."""
    config = make_config(tmp_path)
    save = checkpoints.torch.save

    def full_at_the_second(state, file):
        if not list_checkpoints(config.out):
            return save(state, file)
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 45440 vs 45328")

    def full(path, content):
        raise NotWritten(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoints.torch, "save", full_at_the_second)
    monkeypatch.setattr("cs336_systems.figures.write_atomically", full)
    with pytest.raises(SystemExit) as stopped:
        run_training("python scripts/train.py", config)
    assert stopped.value.code == 1
    told = capsys.readouterr().err
    assert f"error: cannot write under {config.out}: No space left on device. Make room. To go on from" in told
    assert "from checkpoint-00000003.pt: " in told
    assert "Traceback" not in told
    monkeypatch.undo()
    assert run_training("python scripts/train.py --resume", dataclasses.replace(config, resume=True)).step == 8


def test_a_folder_in_which_another_run_is_writing_is_refused(tmp_path, capsys):
    config = make_config(tmp_path)
    config.out.mkdir()
    descriptor = os.open(config.out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # stands for another process's
    with pytest.raises(SystemExit) as stopped:
        run_training("python scripts/train.py", config)
    os.close(descriptor)
    assert stopped.value.code == 2
    assert "another run is writing there" in capsys.readouterr().err
    assert list(config.out.iterdir()) == []


def test_a_run_killed_anywhere_resumes_bit_for_bit(tmp_path):
    changes = {"steps": 150, "checkpoint_every": 7, "validate_every": 50}
    killed = make_config(tmp_path, out=tmp_path / "killed", **changes)
    process = ScriptProcess(tmp_path, "train", *_arguments(killed))
    wait_until(lambda: len(list_checkpoints(killed.out)) >= 2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    reached = read_metrics(killed.out / METRICS)[-1]["step"]
    assert 14 <= reached < 150
    resumed = dataclasses.replace(killed, resume=True)
    assert run_training("python scripts/train.py --resume", resumed).step == 150
    whole = make_config(tmp_path, out=tmp_path / "whole", **changes)
    train(whole)
    assert lines(killed, "train") == lines(whole, "train")
    assert lines(killed, "validation") == lines(whole, "validation")
    assert not list(killed.out.glob(".checkpoint-*"))  # nothing half-written is left


def _interrupt_in(step, *numbers):
    """A Trainer in whose step the process gets signals, as the terminal or a scheduler would send them."""

    class Interrupted(loop.Trainer):
        def step(self, number, count_zeros=False):
            if number == step:
                for one in numbers:
                    signal.raise_signal(one)
            return super().step(number, count_zeros)

    return Interrupted


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Ended by SIGTERM"), (signal.SIGHUP, "Ended by SIGHUP")],
)
def test_a_signal_finishes_and_saves_the_step_and_says_how_to_go_on(tmp_path, monkeypatch, capsys, number, word):
    config = make_config(tmp_path)
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Trainer", _interrupt_in(5, number))
        with pytest.raises(SystemExit) as interrupted:
            run_training("python x.py --out a", config)
    assert interrupted.value.code == 128 + number
    told = capsys.readouterr().err
    assert f"\n{word}: this step is finished and saved first. Once more ends at once, without." in told
    assert f"\n{word} after step 5, which is saved. To go on from there: python x.py --out a --resume\n" in told
    assert [line["step"] for line in lines(config, "train")] == [1, 2, 3, 4, 5]
    assert [path.name for path in list_checkpoints(config.out)][-1] == "checkpoint-00000005.pt"
    assert (config.out / PLOT).exists()
    assert signal.getsignal(number) is before
    assert run_training("x", dataclasses.replace(config, resume=True)).status == "finished"
    whole = make_config(tmp_path, out=tmp_path / "whole")
    train(whole)
    assert lines(config, "train") == lines(whole, "train")


@pytest.mark.parametrize(
    ("second", "word"),
    [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Ended by SIGTERM")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_second_signal_ends_at_once_with_what_is_there(tmp_path, monkeypatch, capsys, second, word):
    config = make_config(tmp_path)
    monkeypatch.setattr(loop, "Trainer", _interrupt_in(5, signal.SIGINT, second))
    with pytest.raises(SystemExit) as interrupted:
        run_training("x", config)
    assert interrupted.value.code == 128 + second
    assert f"\n{word}. To go on from checkpoint-00000003.pt: x --resume\n" in capsys.readouterr().err
    assert [line["step"] for line in lines(config, "train")] == [1, 2, 3, 4]
    assert (config.out / PLOT).exists()


def test_the_end_of_a_launched_run_that_was_stopped_is_cut_short_by_a_second_ctrl_c_alone(monkeypatch, capsys):
    """A launcher passes on what it hears, at once, and sends SIGTERM to ranks that outlive another."""
    before = {number: signal.getsignal(number) for number in STOPPED}
    ended = []
    monkeypatch.setattr(loop, "end_at_once", ended.append)
    try:
        with loop._answering(is_spawned=False, is_launched=True, is_main=True) as interrupts:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            assert interrupts.numbers == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        interrupts.first_s -= IN_SUCCESSION_S
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        signal.raise_signal(signal.SIGINT)
        assert ended == [128 + signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err.count("Interrupted: this step is finished and saved first.") == 1


@pytest.mark.parametrize("parallel", ["none", "ddp"])
def test_sigterm_is_told_with_the_command_that_goes_on(tmp_path, parallel):
    config = make_config(tmp_path, steps=1_000_000, checkpoint_every=2, parallel=parallel)
    script = ScriptProcess(tmp_path, "train", *_arguments(config))
    wait_until(lambda: len(list_checkpoints(config.out)) > 1, "a checkpoint before the newest, which may be half there")
    script.send_signal(signal.SIGTERM)
    assert script.wait() == 128 + signal.SIGTERM
    how = {"none": r" after step \d+, which is saved\. To go on from there", "ddp": r"\. To go on from check.*\.pt"}
    assert re.search(rf"\nEnded by SIGTERM{how[parallel]}: .* --resume\n", script.errors)
    assert "--no-resume" not in script.errors
    assert "Traceback" not in script.errors


def test_a_killed_rank_is_named_with_the_command_that_goes_on(tmp_path):
    config = make_config(tmp_path, steps=1_000_000, checkpoint_every=2, parallel="ddp")
    others = set(forked_processes())
    script = ScriptProcess(tmp_path, "train", *_arguments(config))
    wait_until(lambda: len(list_checkpoints(config.out)) > 1, "a checkpoint before the newest, which may be half there")
    ranks = sorted(set(forked_processes()) - others - {script.pid})
    os.kill(ranks[-1], signal.SIGKILL)
    assert script.wait() == 1
    told = r"\nerror: rank \d of 2 was killed by SIGKILL\. To go on from checkpoint-\d+\.pt: .*--resume\n"
    assert re.search(told, script.errors)
    assert "Traceback" not in script.errors


def test_an_error_in_a_rank_keeps_its_traceback_and_says_how_to_go_on(tmp_path, monkeypatch):
    def failed(*_, **__):
        raise RankFailedError("rank 1 of 2 raised KeyError", 1, "Traceback ...", 1)

    monkeypatch.setattr(run, "run_ranks", failed)
    with pytest.raises(RankFailedError) as error:
        run_training("python x.py", make_config(tmp_path, parallel="ddp"))
    how = "To go on from the beginning, as there is no checkpoint yet: python x.py --resume"
    assert error.value.__notes__ == [f"\n{how}"]


def test_more_ranks_than_cores_are_told(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(feasibility, "usable_cores", lambda: 1)
    monkeypatch.setattr(run, "run_ranks", interrupt)
    with pytest.raises(SystemExit):
        run_training("x", make_config(tmp_path, parallel="ddp", processes=2))
    assert capsys.readouterr().err.startswith("2 ranks share the one core that they may use here, and take turns")


def test_a_run_that_stops_itself_says_why(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_training("x", make_config(tmp_path, learning_rate=1e30, checkpoint_every=1))
    assert stopped.value.code == 1
    errors = capsys.readouterr().err
    assert "error: the gradients' norm is nan at step 2" in errors
    assert "the last good checkpoint is" in errors
    assert (tmp_path / "out" / PLOT).exists()


def _refusal(config, capsys):
    with pytest.raises(SystemExit) as refused:
        run_training("x", config)
    assert refused.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:99"}, "error: --device cuda:99: is not on this machine; it has cpu"),
        ({"batch_size": 3, "accumulation_steps": 2}, "error: --batch-size 3: must be a multiple of 2"),
        ({"parallel": "ddp", "processes": 3}, "error: --batch-size 4: must be a multiple of 3"),
        ({"vocab_size": 100}, "outside the vocabulary of 100 (ids 0 to 99)"),
        ({"ctx": 500}, "has 4000 tokens, of which 400 for validation; context 500 needs more than 500 there"),
        ({"data": Path("nowhere.txt")}, "error: --data nowhere.txt: must be a file"),
        ({"out": Path(__file__)}, "must be a folder that can be written to"),
    ],
)
def test_bad_input_is_refused_before_anything_is_built(tmp_path, capsys, changes, message):
    assert message in _refusal(make_config(tmp_path, **changes), capsys)
    assert not (tmp_path / "out" / METRICS).exists()


def test_an_empty_file_is_refused(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert "is empty" in _refusal(make_config(tmp_path, data=tmp_path / "empty.txt"), capsys)


def test_another_run_is_not_resumed(tmp_path, capsys):
    config = make_config(tmp_path, resume=True)
    train(config)
    for changes, message in (
        ({"seed": 1}, "error: --seed 1: the run under"),
        ({"steps": 9, "seed": 1}, "error: --steps 9: the run under"),  # of several, the first that --help has
        ({"steps": 9}, "with 8, on which its learning rate depends from the first step; go on with that, or name"),
        ({"learning_rate": 0.02}, "was begun with 0.01"),
        ({"precision": "bf16"}, "error: --precision bf16: the run under"),
    ):
        assert message in _refusal(dataclasses.replace(config, **changes), capsys)
    write_text(tmp_path, 5000)
    assert "is not the data that the run under" in _refusal(config, capsys)


def test_a_run_that_is_resumed_with_other_flags_is_told_the_command_that_goes_on(tmp_path, capsys, run_script):
    config = make_config(tmp_path)
    arguments = [word for word in _arguments(config) if word != "--no-resume"]
    assert run_script("train", *arguments)[0] == 0
    for _ in range(2):  # of which the second finds a run that was resumed
        status, _, errors = run_script("train", "--data", config.data, "--out", config.out, "--resume")
        assert status == 2
        assert errors.startswith("error: --size tiny: the run under ")
        told = shlex.split(errors.strip().rpartition("for a new run. To go on: ")[2])
        del told[: told.index("python")]  # what the tests set of the environment
        assert told == ["python", "scripts/train.py", *arguments, "--resume"]
        assert run_script("train", *told[2:])[0] == 0


def test_only_bad_checkpoints_are_refused_by_name(tmp_path, capsys):
    config = make_config(tmp_path, keep_checkpoints=1)
    train(config)
    (path,) = list_checkpoints(config.out)
    path.write_bytes(path.read_bytes()[:-1])
    errors = _refusal(dataclasses.replace(config, resume=True), capsys)
    assert "has no good checkpoint; checkpoint-00000008.pt is refused: it is truncated" in errors


def test_a_damaged_line_of_metrics_is_named_before_anything_is_trained(tmp_path, capsys):
    config = make_config(tmp_path)
    train(config)
    path = config.out / METRICS
    written = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*written[:2], "{broken\n", *written[3:]]))
    errors = _refusal(dataclasses.replace(config, resume=True), capsys)
    assert f"error: {path}, line 3: is no line of metrics" in errors


def test_the_command_line_names_the_flag_and_needs_no_torch():
    for arguments, status, message in (
        (["--help"], 0, "--sharded-optimizer"),
        (["--help"], 0, "--resume cannot"),
        (["--ctx", "0"], 2, "error: --ctx 0: must be at least 1"),
        (["--precision", "fp8"], 2, "invalid choice 'fp8'"),
    ):
        returned, shown = run_without_torch("train", *arguments)
        assert returned == status
        assert message in shown
