"""A reward of your own: full marks for a short thought, none for no thought or a long one.

python train.py 'reward=[accuracy,custom]' reward.custom.function._target_=examples.reward.short_thought \
    reward.custom.weight=0.2 +reward.custom.function.max_characters=40
"""

import re

THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def short_thought(completions: list[str], max_characters: int = 60, **columns: list) -> list[float | None]:
    """Score the length of each completion's thought.

    Args:
        completions: What the policy wrote, one text per row.
        max_characters: A setting; the longest thought that still scores 1.
        columns: Columns of the data, such as ``answer``, by name; here unused.

    Returns:
        1 up to ``max_characters``, falling to 0 at twice as many; 0 without a thought. ``None`` would mean that the
        reward does not apply.
    """
    scores: list[float | None] = []
    for text in completions:
        found = THOUGHT.search(text)
        length = len(found[1].strip()) if found else 0
        scores.append(min(1.0, max(0.0, 2 - length / max_characters)) if length else 0.0)
    return scores
