"""Environments that tests play."""

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
