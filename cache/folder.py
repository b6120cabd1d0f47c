"""The cache folder: made 0700, tagged, and used only when it is ours."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

_TAGS = {
    "README.md": (
        "# Sidestep's cache\n\nRecords of attention that a backend could not build here. Do not commit this folder.\n"
        "It may be deleted at any time: a build that fails is then tried, and recorded, once more.\n"
    ),
    # https://bford.info/cachedir/: backup tools skip a folder that holds this signature.
    "CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is Sidestep's cache. See https://bford.info/cachedir/\n",
    ".gitignore": "# Written by Sidestep.\n*\n",
}

# Names as the kernel gives them. SQLite's write-ahead log needs memory shared by all its users, so one machine
# (https://sqlite.org/wal.html), and flock reaches other hosts on some of these only.
_NETWORK = re.compile(
    r"(fuse\.)?(afs|beegfs|ceph|cifs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|panfs|pvfs2|s3fs|smb3|smbfs|sshfs|wekafs)"
)


def cache_folder(directory: Path, name: str) -> Path:
    """Return ``directory/name``, both made where missing.

    Raises:
        OSError: A folder cannot be made, is not ours, or may be written by others.
    """
    _private(directory, follow_symlinks=True)
    # A folder that holds something else is somebody's: tagging a home folder would take it out of its backups.
    if {entry.name for entry in directory.iterdir()} < _TAGS.keys():
        for tag, text in _TAGS.items():
            with contextlib.suppress(FileExistsError), open(directory / tag, "x", encoding="utf-8") as file:
                file.write(text)
    folder = directory / name
    # A link inside the cache was planted; the cache itself may be a link to a larger disk.
    _private(folder, follow_symlinks=False)
    folder.chmod(0o700)
    return folder


def _private(path: Path, *, follow_symlinks: bool) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat(follow_symlinks=follow_symlinks)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a link where a folder belongs", str(path))
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"owned by user {status.st_uid}, not by us ({os.geteuid()})", str(path))
    if status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "writable by others (chmod go-w makes it private)", str(path))


def replaceable(path: Path) -> Path:
    """Return the file that a new one for `path` is to take the place of, links followed: they stay links.

    Raises:
        OSError: It is a folder, or a device, pipe or socket, of which renaming would make a mere file.
    """
    target = Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.stat().st_mode):
            raise FileExistsError(errno.EEXIST, "not a regular file, so it is not replaced", str(target))
    return target


def refuse_network(path: Path) -> None:
    """Raise OSError when `path` is on a network file system, as far as the kernel tells."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    kind = file_system(path.resolve(), mounts)
    if _NETWORK.fullmatch(kind):
        raise OSError(errno.ENOTSUP, f"a network file system ({kind}): locks do not reach other hosts", str(path))


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds `path`, from the text of /proc/self/mountinfo; "" when unknown."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        # 36 35 98:0 /root /mount/point options - type source options (man 5 proc_pid_mountinfo)
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), (left.split(" ") + [""] * 5)[4])
        # Later lines lie over earlier ones.
        if right and len(point) >= best and path.is_relative_to(point):
            best, kind = len(point), right.split(" ")[0]
    return kind
