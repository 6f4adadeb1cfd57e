"""An environment of your own: spell a word backward, with one hint after a wrong answer.

python train.py environment=custom environment.function._target_=examples.environment.hint environment.max_turns=2 \
    'reward=[environment,format]' rollout.max_new_tokens=160
"""

import re

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def hint(turns: list[str], answer: str) -> float | str:
    """Reply to the model's turns so far; a pure function, so any process may call it again.

    Args:
        turns: Texts of the model's turns, the newest last.
        answer: A column of the data.

    Returns:
        A text is the reply, after which the model takes another turn; a number ends the episode with this score.
    """
    found = ANSWER.search(turns[-1])
    if found and found[1].strip() == answer:
        return 1.0 if len(turns) == 1 else 0.5
    if len(turns) == 2:
        return 0.0
    return f"Wrong. It begins with {answer[0]}."
