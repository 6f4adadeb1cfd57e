"""What the environment itself gave in an episode."""

from collections.abc import Sequence


def of_environment(turn_scores: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """The sum of an environment's own scores.

    With ``advantage=to_go`` each of them counts at the end of its turn.

    Args:
        turn_scores: [B] (number of the turn from 0, score) pairs of each episode.

    Example:
        ``of_environment([[(0, 0.1), (2, 1.0)], []])`` gives [1.1, 0.0].
    """
    return [float(sum(score for _, score in pairs)) for pairs in turn_scores]
