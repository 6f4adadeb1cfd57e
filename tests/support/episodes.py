"""Episodes as they are explained: every token from a forward pass over all before it, replies put behind turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from grpo_lightning.sampler.token_sampling import sample_tokens, uniforms
from grpo_lightning.types import Sampling

Environment = Callable[[Sequence[str]], str | None]
"""All turns so far -> a reply, or None at the end."""


def chatty(turns: Sequence[str]) -> str | None:
    """Replies of 1 to 5 words that hang on the last turn's text; over after 1 to 5 turns."""
    said = turns[-1]
    if len(turns) == 5 or len(said) % 7 == 6:
        return None
    return "The" + " 42" * (len(said) % 5)


@dataclass
class FakeResponder:
    """A responder that plays a pure function of the turns."""

    environment: Environment
    is_slow: bool = False
    role: str | None = None
    turns: dict[int, list[str]] = field(default_factory=dict)

    def step(self, row: int, text: str) -> None:
        self.turns.setdefault(row, []).append(text)

    def reply(self, row: int) -> str | None:
        return self.environment(tuple(self.turns[row]))

    def reject(self, row: int, problem: str) -> None:
        raise AssertionError(problem)


@dataclass
class Episode:
    """One completion of several turns."""

    ids: list[int] = field(default_factory=list)
    is_model: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    sets: list[list[int]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    finished: bool = False


@torch.no_grad()
def played_alone(policy, prompts, environment, *, group_size: int, sampling: Sampling, seed: int) -> list[Episode]:
    """Each episode by itself."""
    tokens = policy.tokenize(prompts)
    return [
        _played(policy, prompt, environment, sampling, uniforms(seed, [(number, member)], sampling.max_new_tokens)[0])
        for number, prompt in enumerate(tokens)
        for member in range(group_size)
    ]


def _played(policy, prompt, environment, sampling, numbers) -> Episode:
    one, turn = Episode(), []
    limit = sampling.max_new_tokens

    def text(ids):
        return policy.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    while len(one.ids) < limit:
        logits = logits_of(policy, prompt + one.ids)
        token, logprob, entropy, _, kept = sample_tokens(logits[None], sampling, numbers[len(one.ids)][None])
        turn.append(int(token))
        one.ids.append(int(token))
        one.is_model.append(True)
        one.logprobs.append(float(logprob))
        one.entropies.append(float(entropy))
        one.sets.append([] if kept is None else kept[kept >= 0].tolist())
        raw = policy.tokenizer.decode(turn, clean_up_tokenization_spaces=False)
        if turn[-1] not in policy.end_ids and not any(stop in raw for stop in sampling.stop):
            continue
        one.turns.append(text(turn))
        reply = environment(tuple(one.turns))
        if reply is None:
            one.finished = True
            return one
        ids = policy.reply_ids(reply, after=turn[-1])
        if len(one.ids) + len(ids) >= limit:
            return one
        one.replies.append(reply)
        one.ids += ids
        one.is_model += [False] * len(ids)
        for values, nothing in ((one.logprobs, 0.0), (one.entropies, 0.0), (one.sets, [])):
            values += [nothing for _ in ids]
        turn = []
    one.turns.append(text(turn))
    return one


def logits_of(policy, ids: Sequence[int]) -> torch.Tensor:
    """The logits [V] behind some tokens."""
    output = policy.model(torch.tensor([list(ids)]))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return logits[0, -1]
