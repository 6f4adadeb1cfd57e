"""Reward functions as a user would write them in a file of their own, right and wrong."""

import os
import sys

from grpo_lightning.reward import Scoring
from grpo_lightning.reward.spec import scalar


def score(rewards, prompts, completions, columns, completion_ids=None):
    """Name -> [B] what the rewards give to completions: numbers, of steps their mean, or None."""
    values = Scoring(rewards, prompts, columns).finish(completions, completion_ids).values
    return {name: [scalar(value) for value in scores] for name, scores in values.items()}


def vowels(completions, **kwargs):
    """TRL's signature: varies with any text."""
    return [sum(c in "aeiou" for c in text) / (len(text) + 1) for text in completions]


def of_messages(prompts, completions, **kwargs):
    """As many as there are messages in prompt and completion, if it knows all of them; else it says what it got."""
    for prompt, completion in zip(prompts, completions, strict=True):
        if [message["role"] for message in completion] != ["assistant"] or prompt[-1]["role"] != "user":
            raise TypeError(f"{prompt!r} {completion!r}")
    return [float(len(prompt + completion)) for prompt, completion in zip(prompts, completions, strict=True)]


def of_one_answer(completion, prompt, answer):
    return 10.0 * len(prompt) + float(completion[0]["content"] == answer)


def fails_on_six(completions, answer):
    return [1 / (int(right) - 6) for right in answer]


def never(completions):
    return [None] * len(completions)


def raising(completions):
    if any(completions):
        raise RuntimeError("judge is out")
    return [0.0] * len(completions)


def same(completions):
    return [1.0] * len(completions)


def second_half(completions):
    """Differs within the second half of the completions only."""
    half = len(completions) // 2
    return [0.5 if i < half else float(i % 2) for i in range(len(completions))]


def every_other_prompt(completions, prompts):
    """Completions of prompts with an odd number of characters differ, those of the others do not."""
    return [float(i % 2) if len(prompt) % 2 else 0.0 for i, prompt in enumerate(prompts)]


def fails_in_process_1(completions, **_):
    if os.environ.get("RANK") == "1":
        raise OSError("no disk in process 1")
    return [0.0] * len(completions)


def as_tensor(completions):
    import torch

    return torch.tensor([len(text) / 4 for text in completions], requires_grad=True)


def as_array(completions):
    import numpy as np

    return np.array([len(text) / 4 for text in completions], dtype=np.float32)


def as_generator(completions):
    return (len(text) / 4 for text in completions)


def as_steps(completions):
    import numpy as np

    return ([(np.int64(1), np.float32(0.25)), (len(text), 0.5)] for text in completions)


def exits(completions):
    sys.exit("\x1b[2Jno more rewards")


def questions(size: int = 8) -> list[dict[str, str]]:
    """Rows for data=custom."""
    return [{"prompt": f"Spell {number}", "answer": str(number)} for number in range(size)]
