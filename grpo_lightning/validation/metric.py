"""Validation metrics over several samples per prompt, as torchmetrics, so that they add up over batches and ranks."""

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _PromptMean(Metric):
    """The mean of one value per prompt.

    Args:
        k: Samples of a prompt that are looked at.
        options: What every torchmetrics ``Metric`` takes.
    """

    full_state_update = False
    total: Tensor
    prompts: Tensor

    def __init__(self, k: int, **options: Any) -> None:
        super().__init__(**options)
        self.k = k
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("prompts", torch.tensor(0), dist_reduce_fx="sum")

    def _add(self, values: Sequence[float]) -> None:
        self.total += sum(values)
        self.prompts += len(values)

    def compute(self) -> Tensor:
        return self.total / self.prompts.clamp(min=1)


class PassAtK(_PromptMean):
    """The chance that at least one of k samples is right, estimated without bias from n >= k samples.

    1 - C(n - c, k) / C(n, k)

    arXiv:2107.03374, Eq. 1, with c of the n samples right.
    """

    def update(self, right: Tensor) -> None:
        """Count some prompts.

        Args:
            right: [P, n] (bool) which samples are right.

        Raises:
            ValueError: n < k.
        """
        samples = right.shape[-1]
        if samples < self.k:
            raise ValueError(f"pass@{self.k} needs at least {self.k} samples per prompt, got {samples}")
        self._add([1 - comb(samples - c, self.k) / comb(samples, self.k) for c in right.sum(-1).tolist()])


class MajorityAtK(_PromptMean):
    """The chance that the commonest answer among the first k samples is right; one of several tied answers is drawn.

    arXiv:2203.11171 (self-consistency).
    """

    def update(self, right: Tensor, answers: Sequence[Sequence[str]]) -> None:
        """Count some prompts.

        Args:
            right: [P, n] (bool) which samples are right, with n >= k.
            answers: [P][n] what each sample answers.

        Raises:
            ValueError: n < k.
        """
        if right.shape[-1] < self.k:
            raise ValueError(f"maj@{self.k} needs at least {self.k} samples per prompt, got {right.shape[-1]}")
        self._add([self._vote(row[: self.k], given) for row, given in zip(right.tolist(), answers, strict=True)])

    @staticmethod
    def _vote(right: list[bool], answers: Sequence[str]) -> float:
        votes = Counter(answers[: len(right)])
        most = max(votes.values())
        verdicts = dict(zip(answers, right, strict=False))
        winners = [answer for answer, count in votes.items() if count == most]
        return sum(verdicts[answer] for answer in winners) / len(winners)
