"""Token ids on disk, memory-mapped: from any text file, from .npy or .bin, or from the Python library's own sources.

Nothing here reads a whole file into memory, and the same files give the same tokens in the same order everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from cs336_basics.data import get_batch
from cs336_systems.configs import check

_CHUNK = 2**24
_END_OF_FILE = b"\0"  # between two sources; no Python source has one


@dataclass(frozen=True)
class TokenFile:
    """Where token ids lie: a plain value, so that each rank opens the file itself.

    `dtype` is NumPy's name of the ids', "" for .npy (which says so itself). Tokens from `n_train` on are validation's.
    """

    path: Path
    dtype: str
    n_tokens: int
    n_train: int
    sha256: str  # of the file, so that a run resumes on the data that it began with

    def open(self) -> tuple[Integer[np.ndarray, " n_train"], Integer[np.ndarray, " n_validation"]]:
        """The training and the validation tokens, memory-mapped."""
        tokens = _map_tokens(self.path, self.dtype)
        return tokens[: self.n_train], tokens[self.n_train :]


def prepare_tokens(
    data: Path | None,
    token_dtype: str,
    vocab_size: int,
    context_length: int,
    validation_share: float,
    cache_dir: Path | None = None,
) -> TokenFile:
    """Finds and checks the data; None stands for the Python library's sources, which are put into `cache_dir` once.

    Args:
        data: a .npy array of ids (one dimension, any integer dtype), a .bin file of bare ids in `token_dtype`, or any
            other file, whose bytes are the ids.
        vocab_size: ids must be below it; the whole file is read to see that, unless its dtype says so.
        context_length: each of the two parts must have more tokens than this.

    Raises:
        ValueError: a file that is missing, empty, unreadable or too short, or an id outside the vocabulary (naming the
            id and its place).
    """
    path = library_text(cache_dir or default_cache_dir()) if data is None else data
    check(path.is_file(), "data", str(path), "must be a file")
    check(path.stat().st_size > 0, "data", str(path), "is empty")
    dtype = "" if path.suffix == ".npy" else token_dtype if data is not None and path.suffix == ".bin" else "uint8"
    tokens = _map_tokens(path, dtype)
    n_tokens = len(tokens)
    n_train = n_tokens - round(n_tokens * validation_share)
    short: tuple[str, object] = ("data", str(path)) if data is not None else ("ctx", context_length)
    what = "" if data is not None else "the text of Python's library "
    for part, count in (("training", n_train), ("validation", n_tokens - n_train)):
        check(
            count > context_length,
            *short,
            f"{what}has {n_tokens} tokens, of which {count} for {part}; context {context_length} needs more than "
            f"{context_length} there",
        )
    _check_vocabulary(path, tokens, vocab_size, is_given=data is not None)
    return TokenFile(path.resolve(), dtype, n_tokens, n_train, _sha256(path))


def training_batch(
    tokens: Integer[np.ndarray, " n_tokens"],
    batch_size: int,
    context_length: int,
    seed: int,
    step: int,
    device: torch.device | str,
) -> tuple[Int[Tensor, "batch_size context_length"], Int[Tensor, "batch_size context_length"]]:
    """The whole batch of a step: inputs and targets on `device`, as `get_batch` draws them.

    It depends on the seed and the step alone, so that a resumed run needs no generator's state, and every number of
    ranks and micro-batches divides the same batch.
    """
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator, from which get_batch draws; torch.manual_seed would seed the cards' too. It looks at
        # 32 bits: multiplied by an odd number, seeds start far from each other, and a run's steps are all different.
        torch.default_generator.manual_seed((seed * 0x9E3779B1 + step) % 2**32)
        return get_batch(tokens, batch_size, context_length, device)


# ---- The Python library as text --------------------------------------------------------------------------------------


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cs336-systems`, or ~/.cache/cs336-systems."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cs336-systems"


def library_text(cache_dir: Path) -> Path:
    """A file of all .py sources of the running Python's standard library, one after another; made at the first call.

    Its tests and installed packages are left out, since they differ from one installation to another. The files come in
    the order of a hash of their names: the end of the text, which validation takes, is a sample of all of it.

    Raises:
        ValueError: this Python has no sources (a zipped library), or the cache cannot be written.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts)
    }
    check(len(sources) > 0, "data", "None", f"{root} has no .py sources to stand in for it; name a file")
    names = sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest())
    contents = hashlib.sha256("".join(f"{name} {sources[name].stat().st_size}\n" for name in names).encode())
    path = cache_dir / f"python-{platform.python_version()}-library-{contents.hexdigest()[:12]}.txt"
    if not path.exists():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            _write_atomically(path, (sources[name].read_bytes() + _END_OF_FILE for name in names))
        except OSError as error:
            raise ValueError(
                f"data=None: the text of Python's library goes to {str(cache_dir)!r}, which can't be written "
                f"({error.strerror}); set XDG_CACHE_HOME, or name a file"
            ) from error
    return path


def _write_atomically(path: Path, parts: Iterable[bytes]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _map_tokens(path: Path, dtype: str) -> Any:
    if dtype:
        item_bytes = np.dtype(dtype).itemsize
        size = path.stat().st_size
        check(size % item_bytes == 0, "data", str(path), f"{size} bytes are no whole number of {dtype} ids")
        return np.memmap(path, dtype=dtype, mode="r")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"data={str(path)!r}: is not a NumPy array file ({error})") from error
    check(
        tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer),
        "data",
        str(path),
        f"must be one-dimensional and of integers; it is {tokens.dtype} of shape {tokens.shape}",
    )
    check(len(tokens) > 0, "data", str(path), "is empty")
    return tokens


def _check_vocabulary(path: Path, tokens: Any, vocab_size: int, is_given: bool) -> None:
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    for start in range(0, len(tokens), _CHUNK):
        chunk = np.asarray(tokens[start : start + _CHUNK])
        if chunk.min() < 0 or chunk.max() >= vocab_size:
            enough = "must be 256, as many as a byte has values, without --data"
            check(is_given, "vocab_size", vocab_size, enough)
            place = int(np.flatnonzero((chunk < 0) | (chunk >= vocab_size))[0])
            raise ValueError(
                f"data={str(path)!r}: token {start + place} is id {chunk[place]}, outside the vocabulary of "
                f"{vocab_size} (ids 0 to {vocab_size - 1}); see --vocab-size and --token-dtype"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
