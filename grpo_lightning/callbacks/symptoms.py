"""Rules that tell an ill run from a healthy one by the course of its metrics.

Each is a function of the course so far that returns the number which gives the illness away, or None. What is not known
of a course is NaN, with which no comparison holds. Nothing here knows of a trainer, so that the rules can be tried on
series of any origin.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

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
        if reached >= self.peak.get("outcome", -math.inf):
            self.peak = {"outcome": reached, "total": self.mean("reward/total", BURST)}

    def validated(self, pass_at_1: float) -> None:
        """Take note of a validation."""
        total = self._mean(self.recent[-WINDOW:], "reward/total")
        if pass_at_1 >= self.validation.get("best", -1.0):
            self.validation = {"best": pass_at_1} | ({} if math.isnan(total) else {"total": total})
        self.validation["newest"] = pass_at_1

    def mean(self, name: str, rollouts: int = WINDOW, *, before: int = 0) -> float:
        """Of a metric over the last ``rollouts``, or as many ``before`` those; NaN without so many values."""
        rows = self.recent[-before - rollouts : len(self.recent) - before]
        return self._mean(rows, name) if len(rows) == rollouts else math.nan

    def start(self, name: str, rollouts: int = 3) -> float:
        """The mean of a metric over the first ``rollouts``; NaN if any value is missing."""
        return self._mean(self.first[:rollouts], name)

    @property
    def has_improved(self) -> bool:
        """Whether the outcome is better now than in the beginning: then its end is an end of learning, not a fault."""
        then = self.start(OUTCOME)
        return self.mean(OUTCOME) > then + 0.05 * max(abs(then), 0.5)

    @staticmethod
    def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
        values = [row.get(name, math.nan) for row in rows]
        return sum(values) / len(values) if values else math.nan


def _standstill(course: Course) -> float | None:
    """Every rollout that is remembered has equal rewards within all groups, so that every advantage is 0."""
    return course.recent[-1].get("reward/total", 0.0) if all(map(_has_no_difference, course.recent)) else None


def _no_gradient(course: Course) -> float | None:
    """The gradient is exactly 0 in every rollout that is remembered, although rewards differ."""
    flat = (row.get("optim/grad_norm") == 0 and not _has_no_difference(row) for row in course.recent)
    return 0.0 if all(flat) else None


def _has_no_difference(row: Mapping[str, float]) -> bool:
    # Advantages are exactly 0 where all rewards of a group are equal; their deviation in float32 rarely is.
    rounding = 1e-6 * max(1.0, abs(row.get("reward/total", 0.0)))
    no_advantage = row.get("advantage/std") == 0 == row.get("advantage/mean")
    return no_advantage and row.get("reward/std", 0.0) <= rounding


def _learning_rate(course: Course) -> float | None:
    """The policy has left its beginning at once, or lost most of what it could, and the total reward fell with it."""
    outcome, total, kl = (course.mean(name, BURST) for name in (OUTCOME, "reward/total", "policy/kl_divergence"))
    if not course.peak:
        return None
    first = course.first[0]
    if not total < max(course.peak["total"], first.get("reward/total", total)):
        return None
    if kl > 2 and outcome < max(course.peak["outcome"], first.get(OUTCOME, outcome)) / 2:
        return kl
    best = course.peak["outcome"]
    return outcome if outcome < best / 4 and outcome < best - 0.1 else None


def _hacking(course: Course) -> float | None:
    """The total reward is higher than where the outcome, or pass@1, was best, which has fallen by a tenth since."""
    outcome, total = course.mean(OUTCOME), course.mean("reward/total")
    best = course.peak.get("outcome", math.nan)
    if outcome < best - 0.1 * max(abs(best), 0.5) and total > course.peak["total"]:
        return outcome
    known = course.validation
    then = known.get("total", course.start("reward/total", 1))
    if known and known["newest"] < known["best"] - 0.1 and total > then:
        return known["newest"]
    return None


def _teaching(course: Course) -> float | None:
    """Few groups differ in their outcome, and that is not because the run has learned to get them right."""
    mixed = course.mean("group/mixed")
    return mixed if mixed < 0.2 and not course.has_improved else None


def _truncation(course: Course) -> float | None:
    """Many completions are cut, or clearly more than in the beginning."""
    cut, then = course.mean("completion/truncated_fraction"), course.start("completion/truncated_fraction")
    return cut if cut > 0.3 or cut > then + 0.1 else None


def _length(course: Course) -> float | None:
    """Completions have become half as long again, and no better."""
    now, then = course.mean("completion/length_mean"), course.start("completion/length_mean", FIRST)
    is_longer = course.count >= 2 * WINDOW and now > 1.5 * then
    return now if is_longer and not course.has_improved else None


def _entropy(course: Course) -> float | None:
    """Hardly any entropy is left although half of the groups are not all right yet, or nothing was learned by it."""
    now, then, right = course.mean("policy/entropy"), course.start("policy/entropy"), course.mean("group/all_right")
    collapsed = now < 0.05 * then and right < 0.5
    is_stuck = now < 0.01 and right <= 1 and not course.has_improved  # without groups nothing is known of it
    return now if collapsed or is_stuck else None


def _clipping(course: Course) -> float | None:
    """The bound of the ratio is active on many tokens."""
    fraction = course.mean("policy/clip_fraction")
    return fraction if fraction > 0.3 else None


def _kl(course: Course) -> float | None:
    """The distance to the reference is large, and grows."""
    now, then = course.mean("policy/kl_divergence"), course.mean("policy/kl_divergence", before=WINDOW)
    return now if now > 0.5 and now > 1.5 * then else None


def _spikes(course: Course) -> float | None:
    """Several gradients are ten times the usual ones, as they are now and were at first, or are not finite."""
    early, rows = (
        [row["optim/grad_norm"] for row in part if "optim/grad_norm" in row]
        for part in (course.first, course.recent[-RECENT:])
    )
    if len(rows) < RECENT:
        return None
    # single spikes of twenty times the median are part of healthy runs; clipping takes care of them
    usual = max(median(early), median(rows))
    spikes = [norm for norm in rows if norm > 10 * usual > 0]
    skipped = [row.get("optim/skipped", 0.0) for row in course.recent[-RECENT:]]
    return max(rows) if len(spikes) + skipped[-1] - skipped[0] >= 4 else None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An illness of runs, how it shows, and what to do."""

    name: str
    finds: Callable[[Course], float | None]
    metric: str
    """Whose row of docs/metrics.md has the advice."""
    said: str
    """What is the matter, with ``{value}`` and ``{rollouts}``, those that a standstill lasts."""
    advice: str
    """What to try; stands in docs/metrics.md word for word."""
    is_hopeless: bool = False
    """Whether nothing good can come of such a run any more; what else shows from then on is a consequence."""


RULES = (
    Rule(
        name="standstill",
        finds=_standstill,
        metric="reward/std",
        said="in each of the last {rollouts} rollouts all completions of a prompt had the same reward (reward/total is "
        "{value:.3g}), so that nothing is learned from them",
        advice="a reward with finer differences, harder or easier prompts, a larger rollout.group_size, a higher "
        "rollout.temperature",
        is_hopeless=True,
    ),
    Rule(
        name="no_gradient",
        finds=_no_gradient,
        metric="optim/grad_norm",
        said="the gradient was exactly 0 in each of the last {rollouts} rollouts although rewards differ, so that no "
        "weight moves",
        advice="look at policy/clip_fraction, at the loss's coefficients, at completion/truncated_fraction with "
        "rollout.mask_truncated, and whether the policy's forward pass is connected to its weights",
        is_hopeless=True,
    ),
    Rule(
        name="learning_rate",
        finds=_learning_rate,
        metric="optim/lr",
        said="the policy has broken down: rewards are gone, and policy/kl_divergence, or the outcome, is {value:.3g}",
        advice="lower optimizer.lr, by a factor of ten if it happens at once, and start anew",
        is_hopeless=True,
    ),
    Rule(
        name="hacking",
        finds=_hacking,
        metric="reward/total",
        said="reward/total rises while the outcome falls, to {value:.3g}",
        advice="lower the weight of what rises, raise loss.kl_coef, read the sample texts",
        is_hopeless=True,
    ),
    Rule(
        name="teaching",
        finds=_teaching,
        metric="group/mixed",
        said="only {value:.0%} of the last groups were mixed, and only those teach",
        advice="much all_wrong: easier prompts or more samples; much all_right: harder ones",
    ),
    Rule(
        name="truncation",
        finds=_truncation,
        metric="completion/truncated_fraction",
        said="{value:.0%} of the last completions were cut",
        advice="raise rollout.max_new_tokens; or environment.max_turns, if the environment has ended too few episodes",
    ),
    Rule(
        name="length",
        finds=_length,
        metric="completion/length_mean",
        said="completions have grown to {value:.0f} tokens without becoming better",
        advice="a length reward, or algorithm=dr_grpo",
    ),
    Rule(
        name="entropy",
        finds=_entropy,
        metric="policy/entropy",
        said="policy/entropy has fallen to {value:.2g} nats per token before the task is learned",
        advice="raise loss.entropy_coef, epsilon_high or the temperature",
    ),
    Rule(
        name="clipping",
        finds=_clipping,
        metric="policy/clip_fraction",
        said="the clip is active on {value:.0%} of the tokens",
        advice="fewer ppo_epochs, a lower learning rate",
    ),
    Rule(
        name="kl",
        finds=_kl,
        metric="policy/kl_divergence",
        said="policy/kl_divergence has grown to {value:.2g} nats per token",
        advice="raise loss.kl_coef, lower the learning rate",
    ),
    Rule(
        name="spikes",
        finds=_spikes,
        metric="optim/grad_norm",
        said="several gradients were ten times as large as usual or not finite, the largest {value:.3g}",
        advice="lower the learning rate, use larger groups or more warm-up",
    ),
)
"""In the order in which they are asked."""


def findings(course: Course, known: Sequence[Mapping[str, Any]], *, patience: int) -> list[tuple[Rule, float]]:
    """The rules that find something now and have not before, with what they found.

    Args:
        course: Of the run.
        known: Earlier findings, each with the name of its "rule".
        patience: Rollouts that a standstill has to last.
    """
    named = {one["rule"] for one in known}
    found: list[tuple[Rule, float]] = []
    for rule in RULES:
        if any(one.is_hopeless for one in RULES if one.name in named):
            break
        window = Course(recent=course.recent[-patience:]) if rule.finds in (_standstill, _no_gradient) else course
        if rule.name in named or (window is not course and len(window.recent) < patience):
            continue
        if (value := rule.finds(window)) is not None:
            found.append((rule, value))
            named.add(rule.name)
    return found
