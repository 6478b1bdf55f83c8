"""A folder for one run at a time: a lock that the system gives back when its process ends, however that ends.

    with locked(folder):
        ...    # another process, or another call of this one, gets a PackError there

The lock is one on an open file, `.treepack.lock`, never the file's being there: what a killed run leaves locks nobody
out. The file is removed while it is locked, so that a finished folder holds nothing of it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import PackError

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        """OSError where another one holds it."""
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        """OSError where another one holds it."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


NAME = ".treepack.lock"
_TAKEN = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. PackError where somebody else does.

    On file systems without locks, and in folders that cannot be written to, there is none: writing says the rest.
    """
    path = folder / NAME
    file = _take(path)
    if file is None:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # an open file cannot be removed on Windows: what stays there locks nobody out
            path.unlink(missing_ok=True)
        os.close(file)


def _take(path: Path) -> int | None:
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return None
        try:
            _lock(file)
            # Whoever had locked it may have removed the file in between: a lock on what has no name locks nobody out.
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(file)
            if error.errno in _TAKEN:
                raise PackError(
                    f"{path.parent}: another run is writing there now; wait until it is done, or name another folder"
                ) from None
            return None
        os.close(file)
