"""Temporary folders: how a save becomes visible at once, or not at all.

Note [Temporary folders]
A save of ``runs/step-5`` writes into ``runs/.step-5.saving-<id>``; rank 0 holds a
lock on ``runs/.step-5.saving-<id>.lock`` meanwhile. When all files are synced the
folder takes the place of ``runs/step-5``:

* nothing is there, or an empty folder: one rename;
* a checkpoint is there: one swap of the two names (renameat2), then the old one,
  now under the temporary name, is deleted;
* the file system cannot swap names: the old one becomes
  ``runs/.step-5.replaced-<id>``, then the new one is renamed. A save that is killed
  between the two leaves no ``runs/step-5``: readers then take the replaced one, and
  the next save puts it back first.

A lock ends with its process. So a file or folder that has such a name and no lock was
left by a save that was killed. The next save to any place in ``runs`` deletes it.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import uuid
from pathlib import Path

from fsdp_c.checkpoint._files import sync_folder
from fsdp_c.checkpoint._manifest import MANIFEST

_LOCK = ".lock"
_TEMPORARY = re.compile(r"\.(.+)\.(saving|replaced)-([0-9a-f]{32})(\.lock)?")
OURS = re.compile(
    r"manifest\.json|rank-\d{5,}-of-\d{5,}\.(json|safetensors|failed)(\.new)?"
)
"""Names in the folder of a checkpoint."""

_NAME_MAX_NBYTES = 255

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}


class TemporaryFolder:
    """A folder that will take the place of ``path``. Made on rank 0.

    Deletes what killed saves left beside it.

    Attributes:
        path: The place that it will take, absolute.
        save_id: 32 hexadecimal digits, different for every save.
        folder: Its own path.

    Raises:
        OSError: It cannot be made.
        ValueError: ``path`` holds something other than a checkpoint, or there is a
            checkpoint and ``overwrite`` is False.
    """

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self.path = os.path.abspath(path)
        self.save_id = uuid.uuid4().hex
        parent, name = os.path.split(self.path)
        base = _beside(self.path, "saving", self.save_id)
        if len(os.path.basename(base).encode()) + len(_LOCK) > _NAME_MAX_NBYTES:
            raise ValueError(f"the name {name!r:.60} is too long for a checkpoint")
        os.makedirs(parent, exist_ok=True)
        clean_up(parent)
        check_target(self.path, overwrite=overwrite)
        self.folder = base
        self._lock = _take_lock(base + _LOCK)
        assert self._lock is not None
        os.mkdir(base)

    def publish(self) -> None:
        """Put the folder in its place; all its files must be synced.

        Raises:
            OSError: It cannot be renamed.
            ValueError: Something else has come to its place.
        """
        check_target(self.path, overwrite=True)
        sync_folder(self.folder)
        parent = os.path.dirname(self.path)
        if not os.path.isdir(self.path) or not os.listdir(self.path):
            os.rename(self.folder, self.path)
        elif not swap_names(self.folder, self.path):
            aside = _beside(self.path, "replaced", self.save_id)
            os.rename(self.path, aside)
            os.rename(self.folder, self.path)
            sync_folder(parent)
            shutil.rmtree(aside)
        sync_folder(parent)
        self.discard()

    def discard(self) -> None:
        """Delete the temporary folder; do nothing the second time."""
        if self._lock is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.unlink(self.folder + _LOCK)
        os.close(self._lock)
        self._lock = None


def _beside(path: str, kind: str, save_id: str) -> str:
    """Return the temporary name of a save to ``path``: "saving" or "replaced"."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{kind}-{save_id}")


def check_target(path: str, *, overwrite: bool) -> None:
    """Check that ``path`` is free, or a checkpoint and nothing else.

    Raises:
        ValueError: It is not.
    """
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        raise ValueError(f"{path} exists and is not a folder: save to another path")
    names = os.listdir(path)
    foreign = sorted(name for name in names if not OURS.fullmatch(name))
    if foreign:
        raise ValueError(
            f"{path} holds {foreign[0]!r}, which is not of a checkpoint and would be "
            "deleted with it: save to another path, or move it away"
        )
    if names and not overwrite:
        raise ValueError(f"there is a checkpoint in {path}: pass overwrite=True")


def swap_names(one: str, other: str) -> bool:
    """Exchange two names at once; return whether the system can.

    Raises:
        OSError: It can, and failed.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    failed = function(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), one, None, other)


def _take_lock(path: str) -> int | None:
    """Return the descriptor of a locked file; None if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def clean_up(parent: str) -> None:
    """Delete what killed saves left in ``parent``; put back what they moved away.

    Source:
        Note [Temporary folders].
    """
    found: dict[tuple[str, str], set[str]] = {}
    for name in os.listdir(parent):
        match = _TEMPORARY.fullmatch(name)
        if match is not None:
            found.setdefault((match[1], match[3]), set()).add(match[2])
    for (name, save_id), kinds in found.items():
        target = os.path.join(parent, name)
        base = _beside(target, "saving", save_id)
        try:
            lock = _take_lock(base + _LOCK)
        except OSError:
            continue  # no locks here: nobody can tell whether it is in use
        if lock is None:
            continue
        try:
            if "replaced" in kinds:
                aside = _beside(target, "replaced", save_id)
                if os.path.lexists(target):
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    os.rename(aside, target)
            shutil.rmtree(base, ignore_errors=True)
            os.unlink(base + _LOCK)
        finally:
            os.close(lock)


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the folder of the checkpoint at ``path``.

    That is ``path``, or what a killed save left instead of it.
    """
    given = os.fspath(path)
    absolute = os.path.abspath(given)
    if os.path.lexists(absolute):
        return given
    parent, name = os.path.split(absolute)
    for each in sorted(os.listdir(parent)) if os.path.isdir(parent) else ():
        match = _TEMPORARY.fullmatch(each)
        if (
            match is not None
            and match.group(1, 2, 4) == (name, "replaced", None)
            and (Path(parent) / each / MANIFEST).is_file()
        ):
            return os.path.join(parent, each)
    return given
