"""The course of a run: what its metrics were in the beginning, at their best and lately."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WATCHED = (
    *("reward/total", "reward/std", "advantage/mean", "advantage/std", "group/mixed", "group/all_right"),
    *("policy/kl_divergence", "policy/entropy", "policy/clip_fraction", "optim/grad_norm", "optim/skipped"),
    *("completion/length_mean", "completion/truncated_fraction"),
)
"""The metrics that rules read, beside the outcome reward."""
OUTCOME = "outcome"
"""The name of the outcome reward in a course, whatever it is called in the run."""
FIRST, RECENT, WINDOW, BURST = 10, 20, 10, 5
"""Rollouts that are remembered from the beginning and from the end; rollouts of a mean, and of one of quick changes."""


@dataclass
class Course:
    """The first and the last rollouts of a run, and where its outcome was best."""

    keep: int = RECENT
    """How many of the last rollouts are remembered."""
    count: int = 0
    first: list[dict[str, float]] = field(default_factory=list)
    recent: list[dict[str, float]] = field(default_factory=list)
    peak: dict[str, float] = field(default_factory=dict)
    """``outcome`` and ``total`` where the mean outcome of `BURST` rollouts was highest."""
    validation: dict[str, float] = field(default_factory=dict)
    """``best``, the highest pass@1, ``total``, the reward at that time, and ``newest``."""

    def add(self, metrics: Mapping[str, float], outcome: str | None) -> None:
        """Take note of a rollout.

        Args:
            metrics: Its metrics by name.
            outcome: The name of the reward that says whether a completion is right, if there is one.
        """
        row = {name: metrics[name] for name in WATCHED if name in metrics}
        if f"reward/{outcome}" in metrics:
            row[OUTCOME] = metrics[f"reward/{outcome}"]
        self.count += 1
        self.first = ([*self.first, row])[:FIRST]
        self.recent = ([*self.recent, row])[-self.keep :]
        reached = self.mean(OUTCOME, BURST)
        if reached is not None and reached >= self.peak.get("outcome", -float("inf")):
            self.peak = {"outcome": reached, "total": self.mean("reward/total", BURST) or 0.0}

    def validated(self, pass_at_1: float) -> None:
        """Take note of a validation."""
        total = self._mean(self.recent[-WINDOW:], "reward/total")
        if pass_at_1 >= self.validation.get("best", -1.0):
            self.validation = {"best": pass_at_1} | ({} if total is None else {"total": total})
        self.validation["newest"] = pass_at_1

    def mean(self, name: str, rollouts: int = WINDOW, *, before: int = 0) -> float | None:
        """Of a metric over the last ``rollouts``, or as many ``before`` those; None without so many values."""
        rows = self.recent[-before - rollouts : len(self.recent) - before]
        return self._mean(rows, name) if len(rows) == rollouts else None

    def start(self, name: str, rollouts: int = 3) -> float | None:
        """The mean of a metric over the first ``rollouts``; None without any value."""
        return self._mean(self.first[:rollouts], name)

    @property
    def has_improved(self) -> bool:
        """Whether the outcome is better now than in the beginning: then its end is an end of learning, not a fault."""
        now, then = self.mean(OUTCOME), self.start(OUTCOME)
        return now is not None and then is not None and now > then + 0.05 * max(abs(then), 0.5)

    @staticmethod
    def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
        values = [row[name] for row in rows if name in row]
        return sum(values) / len(values) if values and len(values) == len(rows) else None
