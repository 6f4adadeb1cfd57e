"""A small disk of its own for a command, by the means that this machine has, and a callback that fills one.

Run as a program it pretends: python -m tests.support.disk BYTES DIRECTORY COMMAND..., where nothing can be mounted.
"""

import errno
import os
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from lightning import Callback

from tests.support.composed import ROOT

MOUNTED = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && "$@"; code=$?; cp -a "$DISK/." "$COPY/"; exit $code'


def on_small_disk(size: int, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` with ``directory`` on a disk of ``size`` bytes, whose content is in it afterwards."""
    directory.mkdir(parents=True)
    copy = directory.with_name(f"{directory.name}_copy")
    copy.mkdir()
    command = [*_pretended(size, directory), *arguments]
    if namespace := _namespace():
        command = [*namespace, "sh", "-c", MOUNTED, "sh", str(size), str(directory), sys.executable, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DISK": str(directory), "COPY": str(copy)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if namespace:
        directory.rmdir()
        copy.rename(directory)
    return ended


@cache
def _namespace() -> list[str]:
    """How to get a place for mounts that nobody else sees; nothing where there is no way."""
    for command in (["unshare", "-m"], ["unshare", "-rm"], ["sudo", "-nE", "unshare", "-m"]):
        tried = [*command, "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
        if shutil.which(command[0]) and subprocess.run(tried, capture_output=True).returncode == 0:
            return command
    return []


def _pretended(size: int, directory: Path) -> list[str]:
    return [sys.executable, "-m", "tests.support.disk", str(size), str(directory)]


class Fill(Callback):
    """Fills the disk of a directory in step ``step``, up to ``left`` bytes, and again before every later one."""

    def __init__(self, directory: str, step: int, left: int) -> None:
        self.directory = Path(directory)
        self.step = step
        self.left = left

    def on_train_batch_start(self, trainer, module, *_):
        if module.completed_steps + 1 >= self.step:
            size = shutil.disk_usage(self.directory).free - self.left
            with (self.directory / "filler").open("ab") as file:
                file.write(bytes(max(0, size)))


def pretend(size: int, directory: Path) -> None:
    """Let this process believe that a directory is on a disk of its own."""

    def used() -> int:
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

    true_usage, true_fsync = shutil.disk_usage, os.fsync

    def usage(path):
        if directory in (Path(path), *Path(path).parents):
            return SimpleNamespace(total=size, used=used(), free=max(0, size - used()))
        return true_usage(path)

    def fsync(descriptor):
        if used() > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    shutil.disk_usage, os.fsync = usage, fsync


if __name__ == "__main__":
    pretend(int(sys.argv[1]), Path(sys.argv[2]))
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(sys.argv[0], run_name="__main__")
