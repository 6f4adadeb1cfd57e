"""A game: the model guesses a number, and is told whether the number is higher or lower."""

import random
from collections.abc import Sequence


def guess(
    turns: Sequence[str], number: int, rng: random.Random, *, guesses: int, highest: int, random_replies: float = 0.0
) -> str | float:
    """Tell the model whether the number is higher or lower than its guess.

    Args:
        turns: What the model has said so far; the last one is new. Surrounding whitespace is ignored.
        number: What is to be guessed, a column of the data.
        rng: Of this episode; decides which replies are random.
        guesses: How many turns the model has.
        highest: The greatest number it may be; the least one is 1.
        random_replies: Probability that a reply is drawn, and says higher or lower whatever the guess was. 1 is a
            control: what is learned then is not learned from replies.

    Returns:
        1.0 for the number, 0.0 for another guess in the last turn, else ``higher``, ``lower``, or what a guess is.

    Raises:
        ValueError: The number is not one of 1 to ``highest``.

    Example:
        ``guess(["16"], 21, rng, guesses=5, highest=31)`` is ``"higher"``, ``guess(["16", "21"], 21, …)`` is 1.0.
    """
    if not 1 <= number <= highest:
        raise ValueError(f"column 'number': {number}; allowed: 1 to {highest}, the highest")
    said = turns[-1].strip()
    if said == str(number):
        return 1.0
    if len(turns) >= guesses:
        return 0.0
    # Every turn has numbers of its own: the same generator comes with all turns of an episode.
    draws = [(rng.random(), rng.choice(("higher", "lower"))) for _ in turns]
    if draws[-1][0] < random_replies:
        return draws[-1][1]
    if not (said.isascii() and said.isdigit() and len(said) <= len(str(highest))):
        return f"a whole number from 1 to {highest}"
    return "higher" if int(said) < number else "lower"
