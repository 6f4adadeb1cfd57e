"""Where links lead."""

import errno
import os
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
    names, here, links = str(path.absolute()).split("/")[::-1], Path("/"), 0
    while names:
        name = names.pop()
        is_inside = within is not None and here.is_relative_to(within)
        if name == ".." and is_inside:
            return None
        if name == ".." and not here.is_dir():
            return None
        if name in ("", ".", ".."):
            here = here.parent if name == ".." else here
            continue
        try:
            target = os.readlink(here / name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                return None
            here /= name
            continue
        links += 1
        if links > _MAX_LINKS or (is_inside and target.startswith("/")):
            return None
        here = Path("/") if target.startswith("/") else here
        names += target.split("/")[::-1]
    return here
