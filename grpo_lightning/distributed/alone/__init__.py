"""A directory for Python's path, from which this package is imported alone, wherever it lies.

In a checkout other things may lie beside it that have the names of packages, such as a data set in ``datasets/``.
"""

import os
import sys
from typing import Any

PLACE = os.path.dirname(__file__)
"""Imports this package from where it is, and takes this directory off the path again."""
ROOT = os.path.realpath(PLACE).rsplit("/", 3)[0]
"""What this package lies in."""
_BESIDE = ("benchmarks", "tests")
"""Packages of a checkout that are started, too."""


class _Finder:
    """Finds the packages of a checkout, and nothing else that lies in it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        from importlib.machinery import PathFinder  # not before the path is what it should be

        return PathFinder.find_spec(fullname, [ROOT]) if path is None and fullname in _BESIDE else None


def leave_checkout() -> None:
    """Take the checkout off the path of a process that was started in it, but for its own packages."""
    if os.path.isfile(f"{ROOT}/train.py"):
        sys.meta_path.append(_Finder())
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != ROOT]


def beside() -> list[str]:
    """The packages beside this one that are loaded, which a process that this one starts may have to import, too."""
    return [name for name in _BESIDE if (found := sys.modules.get(name)) and f"{ROOT}/{name}" in (found.__path__ or ())]
