"""What torch compiles is kept where nobody else can have put files: what is found there again is run."""

import getpass
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Whether torch keeps compiled headers, which it always does in the directory of its own choice."""


def use_private_cache() -> None:
    """Say where torch keeps what it compiles, for this process and those that it starts; a user's own word stays.

    Torch's own choice is ``/tmp/torchinductor_USER``, a name that others can guess and take before. It is kept where
    the directory is the user's or can be made so; else a new one of a name by chance is taken, and no compiled headers
    are kept.
    """
    if not hasattr(os, "getuid"):
        return
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # as in containers without a file of users
        user = f"uid_{os.getuid()}"
    name = re.sub(r"[^\w.-]", "_", user)
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{name}"
    with suppress(OSError):  # of a full or read-only disk torch says more
        is_own = _is_own(usual)
        if not is_own:
            os.environ.setdefault(_HEADERS, "0")
        if not os.environ.get(VARIABLE):  # to torch an empty one is the working directory
            os.environ[VARIABLE] = str(usual) if is_own else tempfile.mkdtemp(prefix="torchinductor_")


def _is_own(place: Path) -> bool:
    """Whether a directory, which is made if there is none, belongs to the user and no others may write to it."""
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    others = stat.S_IWOTH if _is_private(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others


def _is_private(group: int) -> bool:
    """Whether a group is the user's alone, as many systems give one of the user's name to each."""
    import grp  # which not every system has
    import pwd

    try:
        found = grp.getgrgid(group)
        return found.gr_name == pwd.getpwuid(os.getuid()).pw_name and not {*found.gr_mem} - {found.gr_name}
    except KeyError:
        return False
