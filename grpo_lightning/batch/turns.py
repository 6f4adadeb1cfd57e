"""Where the turns of completions are."""

from torch import Tensor


def spans(mask: Tensor) -> list[list[tuple[int, int]]]:
    """The turns of every row of a mask [B, T] of what the model has said: the first token of each, and its end.

    Example:
        Of [1, 1, 0, 0, 1, 0] the turns are (0, 2) and (4, 5).
    """
    found: list[list[tuple[int, int]]] = []
    for row in mask.tolist():
        before, turns, start = False, [], 0
        for place, is_own in enumerate([*row, False]):
            if is_own and not before:
                start = place
            elif before and not is_own:
                turns.append((start, place))
            before = is_own
        found.append(turns)
    return found
