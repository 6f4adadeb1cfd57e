"""A small disk for a command, and a callback that fills one.

python -m tests.support.disk BYTES DIRECTORY SCRIPT ... runs a script that believes a directory to be on such a disk.
"""

import errno
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from lightning import Callback

from tests.support.composed import ROOT


def on_small_disk(size: int, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` with ``directory`` on a disk of ``size`` bytes."""
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.support.disk", str(size), str(directory), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


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
