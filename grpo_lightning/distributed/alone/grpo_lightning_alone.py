"""Imports this package from where it is, and takes this directory off the path again."""

import sys

import grpo_lightning_path

grpo_lightning_path.leave_here()

from importlib.util import module_from_spec, spec_from_file_location  # noqa: E402, loads modules of Python

_here, _root = __file__.rsplit("/", 1)[0], __file__.rsplit("/", 3)[0]
sys.path[:] = [place for place in sys.path if place != _here]
_spec = spec_from_file_location("grpo_lightning", f"{_root}/__init__.py")
if "grpo_lightning" not in sys.modules and _spec is not None and _spec.loader is not None:
    _package = sys.modules["grpo_lightning"] = module_from_spec(_spec)
    _spec.loader.exec_module(_package)
