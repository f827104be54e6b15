"""Checkpoints: whole or refused, and the one before a bad one is used."""

import json

import pytest
import torch

from cs336_systems.files import NotWritten
from cs336_systems.training import checkpoints
from cs336_systems.training.checkpoints import (
    BadCheckpoint,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    save_checkpoint,
)


def _state(value):
    return {"model": {"w": torch.full((50,), float(value))}, "optimizer": [{"state": {0: {"step": value}}}], "n": 1.5}


def _save(folder, *steps, keep=9):
    for step in steps:
        save_checkpoint(folder, step, _state(step), {"seed": 1}, "abc", keep)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    _save(tmp_path, 7)
    loaded = load_checkpoint(checkpoint_path(tmp_path, 7))
    assert (loaded.step, loaded.config, loaded.data_sha256) == (7, {"seed": 1}, "abc")
    assert torch.equal(loaded.state["model"]["w"], torch.full((50,), 7.0))
    assert loaded.state["optimizer"] == [{"state": {0: {"step": 7}}}]


def test_the_newest_are_kept(tmp_path):
    _save(tmp_path, 2, 9, 10, 100, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000010.pt", "checkpoint-00000100.pt"]
    assert len(list(tmp_path.iterdir())) == 4
    newest, refused = load_newest(tmp_path)
    assert (newest.step, refused) == (100, [])


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def _drop_manifest(path):
    path.with_suffix(".json").unlink()


def _spoil_manifest(path):
    path.with_suffix(".json").write_text('{"step": 2')


DAMAGE = [
    (_truncate, r"checkpoint-00000002\.pt is refused: it is truncated, \d+ bytes of \d+"),
    (_lengthen, "refused: it is longer than it was"),
    (_flip, "refused: its bytes are not those that were written"),
    (_drop_manifest, r"refused: it has no checkpoint-00000002\.json, so it was never finished"),
    (_spoil_manifest, r"refused: checkpoint-00000002\.json is no manifest"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(tmp_path, damage, message):
    _save(tmp_path, 1, 2)
    damage(checkpoint_path(tmp_path, 2))
    with pytest.raises(BadCheckpoint, match=message):
        load_checkpoint(checkpoint_path(tmp_path, 2))
    newest, (reason,) = load_newest(tmp_path)
    assert newest.step == 1
    assert "checkpoint-00000002.pt" in reason
    damage(checkpoint_path(tmp_path, 1))  # also if both have no manifest: they were copied without, maybe
    with pytest.raises(ValueError, match=r"resume=.*: has no good checkpoint; checkpoint-00000002\.pt is refused"):
        load_newest(tmp_path)


def test_no_checkpoint_at_all_is_no_error(tmp_path):
    assert load_newest(tmp_path) == (None, [])


def test_the_first_one_that_was_never_finished_is_none(tmp_path):
    _save(tmp_path, 1)
    _drop_manifest(checkpoint_path(tmp_path, 1))
    newest, (reason,) = load_newest(tmp_path)
    assert newest is None
    assert reason == "checkpoint-00000001.pt is refused: it has no checkpoint-00000001.json, so it was never finished"


@pytest.mark.parametrize("step", [1, 2])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, step):
    _save(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(state, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.torch, "save", full_disk)
    with pytest.raises(NotWritten, match="No space"):
        _save(tmp_path, step)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_stop_between_the_two_files_never_vouches_for_the_wrong_bytes(tmp_path, monkeypatch):
    _save(tmp_path, 1, 2)

    def stop(path, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_atomically", stop)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, _state(99), {}, "abc", keep=9)
    newest, (reason,) = load_newest(tmp_path)
    assert newest.step == 1
    assert "never finished" in reason


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    (tmp_path / ".checkpoint-00000007.pt-abc").write_bytes(b"half")
    (tmp_path / ".checkpoint-00000007.json-abc").write_bytes(b"half")
    _save(tmp_path, 8)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_manifest_can_be_read_by_a_person(tmp_path):
    _save(tmp_path, 3)
    manifest = json.loads(checkpoint_path(tmp_path, 3).with_suffix(".json").read_text())
    assert manifest["step"] == 3
    assert manifest["bytes"] == checkpoint_path(tmp_path, 3).stat().st_size
