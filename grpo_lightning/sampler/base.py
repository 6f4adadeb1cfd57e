"""What every sampler has: samplers generate completions, policies score them.

P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, T tokens of the longest completion.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from grpo_lightning.clock import Clock
from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.types import Prompt, Sampled, Sampling, SamplingSupport

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

OnFinished = Callable[[int, str, list[int]], None]
"""(row, text, token ids) of a completion that has just ended, while others are still being generated."""
Poll = Callable[[], None]
"""Called between generated tokens; may raise to abandon the sampling."""


@dataclass(frozen=True)
class Completions:
    """Completions as token ids."""

    ids: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T] (bool) tokens that the model has generated."""
    seen: Tensor
    """[B, T] (bool) these and the replies that it has read."""
    logprobs: Tensor
    """[B, T] in nats, 0 where masked."""
    entropies: Tensor
    """[B, T] in nats, 0 where masked."""
    finished: Tensor
    """[B] (bool) whether a completion ended by itself, not by the length limit."""
    support: SamplingSupport | None = None
    """[B, T] the sets that the tokens were sampled from; None: the whole vocabulary."""


class Responder(Protocol):
    """Replies to the model in multi-turn completions, whose rows are numbered as in one call of `Sampler.generate`."""

    is_slow: bool
    """Whether replies take time: they are asked for only once no completion can go on."""
    role: str | None
    """Role of the replies, user or tool; None: ``policy.reply_role``."""

    def step(self, row: int, text: str) -> None:
        """Give the text of a turn that the model has ended."""
        ...

    def reply(self, row: int) -> str | None:
        """Return the reply to that turn; None ends the completion. Called once after every `step`."""
        ...

    def reject(self, row: int, problem: str) -> None:
        """Say that the policy cannot read the last reply, which ends the completion."""
        ...


class Sampler(ABC):
    """Generates completions with a policy's weights."""

    is_engine = False
    """Whether log-probabilities are computed elsewhere than by the policy."""
    is_coarse = False
    """Whether it rounds to 16 bits, whatever the policy does."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last step by name."""
        return {}

    def ready(self, policy: "Policy", *, version: int, clock: Clock, ranks: Ranks) -> AbstractContextManager[None]:
        """Inside, `generate` uses the policy's weights as they are at the beginning; all processes enter together.

        Args:
            policy: Whose weights are used.
            version: Steps that these weights have behind them.
            clock: Adds up the seconds of handing weights over, as ``sync``, and of waking an engine, as ``wake``.
            ranks: The processes of the run.
        """
        return nullcontext()

    @abstractmethod
    def generate(
        self,
        policy: "Policy",
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_prompt: int = 0,
        poll: Poll | None = None,
        on_finished: OnFinished | None = None,
        responder: Responder | None = None,
    ) -> Sampled:
        """``group_size`` completions of every prompt.

        Sampling is batch-invariant up to rounding: a completion depends on the weights, the seed, and the numbers of
        its prompt and of its place in the group.

        Args:
            policy: Tokenizes, and has the weights.
            prompts: [P]
            group_size: Completions per prompt, G.
            sampling: How tokens are sampled.
            seed: Of the random numbers, in [0, 2^64); no global random state is read or changed.
            first_prompt: Number of the first prompt here, among all that are sampled with this seed.
            poll: Called between tokens.
            on_finished: Called with every single-turn completion that ends before the length limit, as soon as it does.
            responder: Replies to completions that have ended a turn, which then go on behind the reply, until there is
                none or ``max_new_tokens`` are used up, replies included; a reply that leaves no room cuts the
                completion before it. None: single-turn.

        Raises:
            ValueError: A prompt has no tokens, or one that the model has no embedding for, or prompt and completion do
                not fit into the model's context.
            FloatingPointError: The logits are not finite.
        """
