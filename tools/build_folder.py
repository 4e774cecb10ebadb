"""Where a build keeps its files, and how builds that run at once take turns there."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build_log import say
from errors import BuildError

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def scratch_folder() -> Path:
    """A folder of this process, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="flash_attn-build-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def is_writable(checkout: Path = ROOT) -> bool:
    """Whether this user can build in `checkout`."""
    folder = checkout / "build"
    return os.access(folder if folder.exists() else checkout, os.W_OK)


def build_folder() -> Path:
    """Where objects are kept for the next build: build/ of the checkout. Of a read-only one: scratch_folder()."""
    return ROOT / "build" if is_writable() else scratch_folder()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes `folder`, and waits until no other process is in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise BuildError(f"{folder}: expected a folder that this user can write ({error.strerror})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build in {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
