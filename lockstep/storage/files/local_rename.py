"""Renames on a local disk that never overwrite."""

from __future__ import annotations

import ctypes
import errno
import os
import stat as stat_bits
import sys

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # kernels and file systems without renameat2's flag


def rename_noreplace(source: str, target: str) -> None:
    """Rename in one step of the kernel where it has one. Raises FileExistsError where the name is taken."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "renameat2"):
            names = os.fsencode(source), os.fsencode(target)
            if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) == 0:
                return
            code = ctypes.get_errno()
            if code not in _NOT_THERE:
                raise OSError(code, os.strerror(code), source, None, target)
    rename_noreplace_portable(source, target)


def rename_noreplace_portable(source: str, target: str) -> None:
    """Rename without overwriting where renameat2 is missing: exact for files (a hard link fails on an occupied
    name); for directories a look beforehand, since rename refuses a target directory with content but not an
    empty one.
    """
    if stat_bits.S_ISDIR(os.lstat(source).st_mode):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(source, target)
    else:
        os.link(source, target, follow_symlinks=False)
        os.unlink(source)
