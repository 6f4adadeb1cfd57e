"""A directory for Python's path, from which this package is imported alone, wherever it lies.

In a checkout other things may lie beside it that have the names of packages, such as a data set in ``datasets/``.
"""

import os

PLACE = os.path.dirname(__file__)
"""Imports this package from where it is, and takes this directory off the path again."""
