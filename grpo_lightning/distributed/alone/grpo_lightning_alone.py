"""Imports this package from where it is, and takes this directory off the path again."""

import sys

import grpo_lightning_path

grpo_lightning_path.leave_here()

from importlib.util import module_from_spec, spec_from_file_location  # noqa: E402, loads modules of Python

_here, _root = __file__.rsplit("/", 1)[0], __file__.rsplit("/", 4)[0]
sys.path[:] = [place for place in sys.path if place != _here]


def load(*names: str) -> None:
    """Import packages that lie beside this one in a checkout, which is not on the path; those that there are."""
    for name in names:
        spec = spec_from_file_location(name, f"{_root}/{name}/__init__.py")
        if name not in sys.modules and spec is not None and spec.loader is not None:
            package = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(package)


load("grpo_lightning")
