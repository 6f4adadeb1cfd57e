"""The paths of Python and of programs without what only a slip has put there; imports only what is loaded already."""

import os
import sys

_ROOT = os.path.realpath(__file__).rsplit("/", 4)[0]


def leave_here() -> None:
    """Take the working directory off Python's path if nothing but an empty element of ``PYTHONPATH`` has put it there.

    ``export PYTHONPATH=$PYTHONPATH:/tools`` leaves one where the variable was not set before. And the checkout, if
    ``pip install -e`` has put it there: this package is found all the same, and other folders in it are no packages.
    Empty elements of ``PATH`` are taken away, too: W&B asks for programs that few have, such as ``neuron-monitor``.
    """
    if "" in (programs := os.environ.get("PATH", "").split(os.pathsep)) and len(programs) > 1:
        os.environ["PATH"] = os.pathsep.join(filter(None, programs))
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_checkout = os.path.isfile(f"{_ROOT}/train.py") and not os.path.isdir(f"{_ROOT}/grpo_lightning/conf")
    if is_checkout and _ROOT not in map(os.path.realpath, filter(None, places)):
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != _ROOT]
    if "" in places and len(places) > 1:
        named = [place for place in places if place]
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
        if (here := os.getcwd()) not in map(os.path.abspath, named):
            sys.path[:] = [place for place in sys.path if place != here]
