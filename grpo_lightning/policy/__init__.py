"""What the trainer asks of a language model."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.memory import Shape
from grpo_lightning.sampler.support import EngineSupport
from grpo_lightning.transformer.head import LossGradient
from grpo_lightning.transformer.packing import lengths, padded_microbatches, same_prompts
from grpo_lightning.types import Message, Prompt, Rollout, Sampled, Sampling


class Policy(nn.Module, ABC):
    """A causal language model that owns its tokenizer.

    B = P * G rows, a prompt's own rows adjacent; T completion tokens.
    """

    idle_device: torch.device | None = None
    """Where the weights lie while they are not used; None: where they are used."""

    def offload(self) -> None:
        """Keep the weights, which must be frozen, in the computer's memory, except inside `present`.

        Raises:
            ValueError: Some are trained.
        """
        if trained := [name for name, weight in self.named_parameters() if weight.requires_grad]:
            raise ValueError(f"offload: allowed for frozen weights; {trained[0]} is trained")
        self.idle_device = torch.device("cpu")
        self.to(self.idle_device)
        if torch.cuda.is_available():
            for weight in self.parameters():
                weight.data = weight.data.pin_memory()  # a GPU reads it several times as fast

    @contextmanager
    def present(self, device: torch.device) -> Iterator[None]:
        """Inside, the weights of an offloaded policy are on ``device``: copies, which are dropped afterwards."""
        if self.idle_device is None:
            yield
            return
        kept = [(weight, weight.data) for weight in self.parameters()]
        self.to(device, non_blocking=True)
        try:
            yield
        finally:
            for weight, values in kept:
                weight.data = values
            self.to(self.idle_device)  # what else it holds, such as frequencies of positions, may have changed

    @abstractmethod
    def logprobs_and_entropy(
        self,
        rows: Sampled | Rollout,
        *,
        temperature: float,
        entropy: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of every completion token, and entropy of the distribution it comes from.

        Args:
            rows: Prompt and completion as token ids, and the sets ``support`` that the tokens were drawn from:
                probabilities are those of the set, which is held as it is. ``rows.without_support`` has none.
            temperature: Divides the logits.
            entropy: Whether the entropy is wanted; it passes a gradient.
            loss_gradient: What the gradient with respect to the log-probabilities is going to be, if that is known:
                saves time, changes no result.

        Returns:
            Two [B, T] float32 tensors in nats, 0 where masked; None in place of an entropy that is not wanted.
        """

    def support(self, rows: Sampled | Rollout, sampling: Sampling) -> EngineSupport:
        """The sets that an engine with this policy's weights draws the completion tokens of ``rows`` from.

        Args:
            rows: Prompt and completion as token ids.
            sampling: How they were drawn, truncated.

        Returns:
            The sets [B, T], with every drawn token in its own, and which tokens [B, T] had to be added to theirs.

        Raises:
            NotImplementedError: Engines know no such policies.
        """
        raise NotImplementedError(f"{type(self).__name__}.support")

    def logprobs(self, rows: Sampled | Rollout, *, temperature: float) -> Tensor:
        """The first of what ``logprobs_and_entropy`` returns, [B, T]."""
        return self.logprobs_and_entropy(rows, temperature=temperature)[0]

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        """Index tensors that cut ``rows`` into micro-batches within a budget of tokens."""
        return padded_microbatches(rows, tokens)

    def own_microbatches(self, rows: Sampled | Rollout, tokens: int, ranks: Ranks) -> tuple[list[Tensor], int]:
        """The micro-batches of ``rows`` that fall to this process, as many as to every other one.

        Args:
            rows: The same in all processes.
            tokens: Most tokens in one forward pass.
            ranks: The processes; groups stay together where there are enough of them.

        Returns:
            Index tensors, and how many at the end are idle: there only to make as many forward passes as the others.
        """
        if ranks.size == 1:
            return self.microbatches(rows, tokens), 0
        sizes, prompts = lengths(rows)
        groups = same_prompts(rows)
        for group in groups:
            sizes[group[0]] += prompts[group[0]]
        device = rows.mask.device
        of_rank = [torch.tensor(part, dtype=torch.long, device=device) for part in ranks.balance(groups, sizes)]
        batches = [
            [part[index] for index in self.microbatches(rows[part], tokens)] if len(part) else [] for part in of_rank
        ]
        own = batches[ranks.rank]
        idle = max(map(len, batches)) - len(own)
        return [*own, *[torch.zeros(1, dtype=torch.long, device=device)] * idle], idle

    def flops(self, rows: Sampled | Rollout) -> float:
        """Least floating-point operations of ``logprobs`` without gradient; 0 where that is not known."""
        return 0.0

    def flops_per_second(self) -> float:
        """The most of them that the machine does in a second, as measured now; 0 where that is not known."""
        return 0.0

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion together; None: any number, or not known."""
        return None

    def shape(self) -> Shape | None:
        """The model's sizes, for a prediction of memory; None where they are not known."""
        return None

    @abstractmethod
    def demonstrate(self, prompts: Sequence[Prompt], completions: Sequence[str | list[Message]]) -> Sampled:
        """Given completions as rows, each ended by the end-of-sequence token; ``logprobs`` are zero.

        A completion of several turns is a list of messages, the assistant's in turn with replies, which are not in
        ``mask``.
        """

    @abstractmethod
    def token_at(self, ids: Sequence[int], end: int) -> int:
        """Index of the completion token with which the decoded text has ``end`` characters; else of the last one."""

    @abstractmethod
    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """Length of each prompt in tokens, chat template included."""

    @abstractmethod
    def export(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write weights, configuration and tokenizer in Hugging Face format.

        Args:
            directory: Where to.
            weights: Named as in ``state_dict``, where the policy holds a part of them only.
        """
