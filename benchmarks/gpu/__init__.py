"""One command of less than ten minutes that checks and measures on a fresh machine with a CUDA device.

``runner`` starts every stage of ``stages`` in a process of its own (``apart``), which is ended when its time is over.
A stage is a module here with ``run(reduced: bool) -> dict``: its figures, "passed" (bool), "main" (its main figure, as
text) and "not_tested" (texts).
"""
