"""Imports this package in a job from where it is, which may be a checkout in which other things were unpacked.

Python imports a module of this name when it starts; see `grpo_lightning.distributed.fresh.protect_jobs`.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

_here, _root = __file__.rsplit("/", 1)[0], __file__.rsplit("/", 3)[0]
sys.path[:] = [place for place in sys.path if place != _here]
_package = spec_from_file_location("grpo_lightning", f"{_root}/__init__.py")
_other = PathFinder.find_spec("sitecustomize", sys.path)  # of the system's
for _spec in filter(None, (_package, _other)):
    _module = sys.modules[_spec.name] = module_from_spec(_spec)
    if _spec.loader is not None:
        _spec.loader.exec_module(_module)
