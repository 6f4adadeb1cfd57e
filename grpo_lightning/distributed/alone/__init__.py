"""A directory for Python's path, from which this package is imported alone, wherever it lies.

In a checkout other things may lie beside it that have the names of packages, such as a data set in ``datasets/``.
"""

from pathlib import Path

PLACE = str(Path(__file__).parent)
