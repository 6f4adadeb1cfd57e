"""What writes metrics, settings and tables down: Lightning's loggers, and what they lack to go on with a run.

Of Lightning's own, ``TensorBoardLogger`` is used as it is.
"""
