"""Environments that tests play."""

import os
import random
import signal
import time


def vowels(turns, rng):
    """Over after 1 to 4 turns; each gives a score by its length, and replies are drawn."""
    said = turns[-1]
    if len(turns) == 4 or said.endswith(("a", "e", "A", "B")):
        return len(said) / 10
    return rng.choice(["12", "3", "0 0"]), 0.1 * len(said)


def slow(turns):
    """Takes its time, and never comes to an end."""
    time.sleep(0.05)
    return "1"


def again(turns, answer, rng):
    """Whether the answer has been said: right away it is worth 1, later less."""
    if str(answer) in turns[-1]:
        return 1.0 - 0.2 * (len(turns) - 1)
    return f"no {rng.randrange(10)}", -0.1


def unwell(turns, answer, rng):
    """As `again`, but with every kind of fault that a worker can have."""
    fault = random.Random(turns[-1]).randrange(12) if len(turns) == 2 else 11
    if fault == 0:
        time.sleep(600)
    elif fault == 1:
        os._exit(3)
    elif fault == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == 3:
        raise OSError("the service is gone")
    elif fault == 4:
        return float("nan")
    return again(turns, answer, rng)
