"""What Python imports when it starts a job of a launcher: this package, and the system's module of this name."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import grpo_lightning_alone  # noqa: F401

_spec = PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _module = sys.modules["sitecustomize"] = module_from_spec(_spec)
    _spec.loader.exec_module(_module)
