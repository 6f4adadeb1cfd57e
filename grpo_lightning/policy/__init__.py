"""What the trainer asks of a language model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from grpo_lightning.batch import Prompt, Rollout, Sampled, Sampling

Poll = Callable[[], None]
"""Called between generated tokens; may raise to abandon the sampling."""
Ended = Callable[[int, str, list[int]], None]
"""(row, text, token ids) of a completion that has just ended, while others are still being sampled."""


class Policy(nn.Module, ABC):
    """A causal language model that owns its tokenizer.

    B = P * G rows, a prompt's own rows adjacent; T completion tokens.
    """

    @abstractmethod
    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        poll: Poll | None = None,
        ended: Ended | None = None,
    ) -> Sampled:
        """``group_size`` completions of every prompt; the same seed and weights give the same completions.

        Args:
            prompts: [P]
            group_size: Completions per prompt, G.
            sampling: How tokens are drawn.
            seed: Of the random numbers; no global random state is read or changed.
            poll: Called before every token.
            ended: Called with every completion that ends before the length limit, as soon as it does.

        Raises:
            ValueError: A prompt has no tokens, or prompt and completion do not fit into the model's context.
            FloatingPointError: The logits are not finite.
        """

    @abstractmethod
    def score(
        self, rows: Sampled | Rollout, *, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of every completion token, and entropy of the distribution it comes from.

        Args:
            rows: Prompt and completion as token ids.
            temperature: Divides the logits.
            entropy_gradient: Whether the entropy passes a gradient.

        Returns:
            Two [B, T] float32 tensors in nats, 0 where masked.
        """

    def logprobs(self, rows: Sampled | Rollout, *, temperature: float) -> Tensor:
        """The first of what ``score`` returns, [B, T]."""
        return self.score(rows, temperature=temperature)[0]

    @abstractmethod
    def demonstrate(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> Sampled:
        """Given completions as rows, each ended by the end-of-sequence token; ``logprobs`` are zero."""

    @abstractmethod
    def token_at(self, ids: Sequence[int], end: int) -> int:
        """Index of the completion token with which the decoded text has ``end`` characters; else of the last one."""

    @abstractmethod
    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """Length of each prompt in tokens, chat template included."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write weights, configuration and tokenizer in Hugging Face format."""
