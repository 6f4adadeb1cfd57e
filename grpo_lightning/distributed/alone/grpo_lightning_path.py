"""Python's path without what only a slip has put there; imports nothing that is not loaded already."""

import os
import sys


def leave_here() -> None:
    """Take the working directory off Python's path if nothing but an empty element of ``PYTHONPATH`` has put it there.

    ``export PYTHONPATH=$PYTHONPATH:/tools`` leaves one where the variable was not set before.
    """
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "" in places and len(places) > 1:
        named = [place for place in places if place]
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
        if (here := os.getcwd()) not in map(os.path.abspath, named):
            sys.path[:] = [place for place in sys.path if place != here]
