"""Where links lead."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

_NO_LINK = (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EACCES)
"""What is said of a name that is no link, or that nobody can follow."""
_MAX_LINKS = 40
"""As many Linux follows."""


def followed(path: Path, *, within: Path | None = None) -> Path | None:
    """Where a path leads, with all links followed; None if that cannot be told, as by ``..`` of what is not there yet.

    `os.path.realpath` takes a link for a plain name where the whole path up to it is too long to be asked for. The
    operating system walks from directory to directory and follows it.

    Args:
        path: The path.
        within: A directory, with links followed, in which a way must not go up again or by a link that begins with
            ``/``: links on it may lead elsewhere later, and the way with them. None comes of one that does.
    """
    here = Path("/")
    try:
        for place, name, target in steps(path):
            is_inside = within is not None and place.is_relative_to(within)
            if name == ".." and (is_inside or not place.is_dir()):
                return None
            if target and target.startswith("/") and is_inside:
                return None
            here = _next(place, name, target)
    except OSError:
        return None
    return here


def leads_elsewhere(path: Path, directory: Path) -> bool:
    """Whether something below a directory, which may be a stranger's, is by links a file of another place.

    Args:
        path: What is to be read; it need not exist.
        directory: It may be a link itself.
    """
    home, end = followed(directory), followed(path)
    return home is None or end is None or not end.is_relative_to(home)


def steps(path: Path) -> Iterator[tuple[Path, str, str | None]]:
    """The names on the way along a path, also by its links, as directory with links followed, name, and link's target.

    Raises:
        OSError: A name cannot be looked at, or there are more links than Linux follows.
    """
    names, here, links = str(path.absolute()).split("/")[::-1], Path("/"), 0
    while names:
        name = names.pop()
        if name in ("", "."):
            continue
        target = None if name == ".." else _target(here / name)
        yield here, name, target
        here = _next(here, name, target)
        if target is not None:
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            names += target.split("/")[::-1]


def _next(here: Path, name: str, target: str | None) -> Path:
    """Where a step leads; a link's to where its target begins."""
    if target is not None:
        return Path("/") if target.startswith("/") else here
    return here.parent if name == ".." else here / name


def _target(path: Path) -> str | None:
    """What a link names; None if a path is no link."""
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return None
