"""Checkpoints that are whole or refused: each file is written beside, flushed, and renamed, then its manifest.

A checkpoint is `checkpoint-00000100.pt` (torch.save of tensors and plain values) and `checkpoint-00000100.json`, which
says how many bytes the first has and their SHA-256. A file without its manifest was never finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cs336_systems.files import write_atomically, writing


class BadCheckpoint(ValueError):
    """A checkpoint that is not what was written; the message names the file and says how."""


class Unfinished(BadCheckpoint):
    """One whose writing was ended before its manifest was there."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `step`: `state` for the run to go on, `config` and `data_sha256` to know it by."""

    path: Path
    step: int
    config: dict[str, Any]
    data_sha256: str
    state: dict[str, Any]


def checkpoint_path(directory: Path, step: int) -> Path:
    """E.g. `directory/checkpoint-00000100.pt`."""
    return directory / f"checkpoint-{step:08d}.pt"


def list_checkpoints(directory: Path) -> list[Path]:
    """Paths of all checkpoints, oldest first, whether or not they are whole."""
    found = [path for path in directory.glob("checkpoint-*.pt") if re.fullmatch(r"checkpoint-\d+\.pt", path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("checkpoint-")))


def save_checkpoint(
    directory: Path, step: int, state: dict[str, Any], config: dict[str, Any], data_sha256: str, keep: int
) -> Path:
    """Writes a checkpoint and then removes all but the newest `keep`; returns its path.

    Whenever this is stopped, by a kill or a full disk, the checkpoints from before are whole.

    Raises:
        NotWritten: it could not be written.
    """
    path = checkpoint_path(directory, step)
    with writing(path):
        for leftover in directory.glob(".checkpoint-*"):  # of a run that was killed while it wrote
            leftover.unlink()
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w+b") as file:
                _save(state, file)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                size, digest = os.fstat(file.fileno()).st_size, _sha256(file)
            # An older manifest of this step must not vouch for the new file.
            path.with_suffix(".json").unlink(missing_ok=True)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    manifest = {"step": step, "bytes": size, "sha256": digest, "data_sha256": data_sha256, "config": config}
    write_atomically(path.with_suffix(".json"), json.dumps(manifest, indent=1) + "\n")
    for old in list_checkpoints(directory)[:-keep]:
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink()
    return path


def _save(state: dict[str, Any], file: Any) -> None:
    """`torch.save`, which hides what a file that cannot be written to says behind a RuntimeError of its own."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        hidden = error.__context__
        while hidden is not None and not isinstance(hidden, OSError):
            hidden = hidden.__context__
        raise hidden or error from None


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint, its tensors onto the CPU.

    Raises:
        BadCheckpoint: it has no manifest, or is shorter or other than its manifest says.
    """
    manifest_path = path.with_suffix(".json")
    if not manifest_path.exists():
        raise Unfinished(f"{path.name} is refused: it has no {manifest_path.name}, so it was never finished")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        size, digest = manifest["bytes"], manifest["sha256"]
        step, config, data_sha256 = manifest["step"], manifest["config"], manifest["data_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{path.name} is refused: {manifest_path.name} is no manifest ({error})") from error
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            word = "truncated" if found < size else "longer than it was"
            raise BadCheckpoint(f"{path.name} is refused: it is {word}, {found} bytes of {size}")
        if _sha256(file) != digest:
            raise BadCheckpoint(f"{path.name} is refused: its bytes are not those that were written (SHA-256 differs)")
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
    return Checkpoint(path, step, config, data_sha256, state)


def load_newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint (None if there are none at all, or only the first, unfinished), and why newer ones
    were refused.

    Raises:
        ValueError: there are checkpoints, and every one is bad.
    """
    refused: list[str] = []
    is_finished = False
    for path in reversed(list_checkpoints(directory)):
        try:
            return load_checkpoint(path), refused
        except BadCheckpoint as error:
            refused.append(str(error))
            is_finished |= not isinstance(error, Unfinished)
    if is_finished or len(refused) > 1:
        raise ValueError(f"resume={str(directory)!r}: has no good checkpoint; {'; '.join(refused)}")
    return None, refused


def _sha256(file: Any) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
