"""Where links lead."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_lightning import start

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


def linked_part(path: Path, *homes: Path) -> Path | None:
    """The link on the way along a path that leads out of the folder that it lies in, where a stranger may have made it.

    Links of the user's own lie in the directory of the start, in the home directory, and in what these lie in; those of
    the administrator belong to him. Anything else may have been unpacked, also what a link of the user's leads through;
    and so may the directory of the start, so that no link in it leads to a hidden directory, where programs run files.

    Args:
        path: The path.
        homes: Directories in which no link is followed at any rate.

    Returns:
        The link, by where it lies with links followed; None if there is none.
    """
    own = [start.place(), *filter(None, [followed(Path(os.path.expanduser("~")))])]
    inside = [followed(home) for home in homes]
    last = hiding = None
    try:
        for place, name, target in steps(path):
            if target is None:
                continue
            last = place / name
            is_own = any(known.is_relative_to(place) for known in own) or 0 == last.lstat().st_uid != os.geteuid()
            is_inside = any(home is None or place.is_relative_to(home) for home in inside)
            if (is_inside or not is_own) and leads_out(last, place):
                return last
            if place.is_relative_to(own[0]) and is_in_hidden(last):
                hiding = hiding or last
    except OSError:
        return last  # beyond which nobody can look
    return hiding


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a path is a link to something outside of a directory, or a file that has names in others than its own.

    A link counts that leads into the directory by a way out of it, which may lead elsewhere later.
    """
    if path.is_symlink():
        home = followed(directory)
        target = home and followed(home / path.relative_to(directory), within=home)
        if home is None or target is None or not target.is_relative_to(home):
            return True
        return leads_out(target, directory)
    if not path.is_file() or path.lstat().st_nlink == 1:
        return False
    names = [one for one in path.parent.iterdir() if not one.is_symlink() and one.samefile(path)]
    return len(names) < path.lstat().st_nlink


def is_in_hidden(path: Path) -> bool:
    """Whether a path leads to a hidden directory, or into one, other than those that the start itself is in."""
    place, own = followed(path), start.place()
    parts = () if place is None else place.relative_to(own).parts if place.is_relative_to(own) else place.parts
    return any(part.startswith(".") for part in parts)
