"""Writing files of our own: whole or not at all, with an error that says which, and one run at a time in a folder."""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_LONGEST_SOCKET_PATH = 103


class NotWritten(OSError):
    """One of our own files could not be written, as where the disk is full: not what a measurement itself raises."""

    @property
    def in_a_line(self) -> str:
        """What a script that does not catch it says."""
        return f"cannot write {self.filename}: {self.strerror}. Make room, and run it again."


def check_writable(directory: Path, name: str = "out") -> None:
    """Makes the directory, and raises ValueError, naming it and the argument, if no file can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        file = next((path for path in (directory, *directory.parents) if os.path.isfile(path)), None)
        which = "it" if file == directory else file
        why = error.strerror if file is None else f"{which} is a file"
        raise ValueError(f"{name}={str(directory)!r}: must be a folder that can be written to ({why})") from error


def leave_room_for_sockets() -> None:
    """multiprocessing keeps its sockets in a folder under TMPDIR, and a socket's path has 103 characters at most (107
    on Linux): where TMPDIR leaves too few for that folder's name and the socket's, the folder is under /tmp."""
    if len(os.fsencode(tempfile.gettempdir())) + len("/pymp-12345678/listener-12345678") <= _LONGEST_SOCKET_PATH:
        return
    before, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # makes it once
    finally:
        tempfile.tempdir = before


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Inside, an OSError is that `path`, a file of our own, could not be written: NotWritten."""
    try:
        yield
    except OSError as error:
        raise NotWritten(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file whole, or leaves it as it was and raises NotWritten."""
    temporary = path.parent / f".{path.name}-{os.getpid()}"
    with writing(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


_locked_folders: set[Path] = set()


def lock_folder(directory: Path) -> None:
    """Keeps other processes' runs out of a folder until this process ends; two would overwrite each other's rows.

    Raises ValueError while another process has it. Without file locks (Windows, some network disks) it does nothing.
    """
    try:
        import fcntl

        folder = directory.resolve()
        if folder in _locked_folders:
            return
        descriptor = os.open(folder, os.O_RDONLY)  # left open: the lock goes with it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"out={str(directory)!r}: another run is writing there; wait for it, or name another folder"
        ) from None
    except (ImportError, OSError):
        return
    _locked_folders.add(folder)
