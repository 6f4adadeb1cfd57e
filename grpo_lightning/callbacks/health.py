"""Health checks: rules on the recent metrics of a run, and the callback that reports what they find."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lightning import Callback, LightningModule, Trainer

from grpo_lightning.console import write_json

log = logging.getLogger(__name__)

TOTAL, KL = "reward/total", "policy/kl_divergence"
CUT, LENGTH = "completion/truncated_fraction", "completion/length_mean"
_METRICS = (
    *(TOTAL, KL, CUT, LENGTH, "reward/std", "advantage/mean", "advantage/std", "group/mixed", "group/all_right"),
    *("policy/entropy", "policy/clip_fraction", "optim/grad_norm", "optim/skipped"),
)
OUTCOME = "outcome"  # the name of the outcome reward in a history, whatever its name in the run
FIRST, RECENT, WINDOW, SHORT_WINDOW = 10, 20, 10, 5
"""Rollouts kept from the beginning and from the end; rollouts in a mean, and in one for quick changes."""


@dataclass
class HealthHistory:
    """The first and the last rollouts of a run, and where its outcome was best; a missing value is NaN."""

    patience: int
    """Rollouts in a row without signal that count as a standstill."""
    count: int = 0
    first: list[dict[str, float]] = field(default_factory=list)
    recent: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    """``outcome`` and ``total`` where the mean outcome of `SHORT_WINDOW` rollouts was highest."""
    validation: dict[str, float] = field(default_factory=dict)
    """``best``, the highest pass@1, ``total``, the reward at that time, and ``newest``."""

    def add(self, metrics: Mapping[str, float], outcome: str | None) -> None:
        """Add the metrics of a rollout; ``outcome`` names the reward that says whether a completion is right."""
        row = {name: metrics[name] for name in _METRICS if name in metrics}
        if f"reward/{outcome}" in metrics:
            row[OUTCOME] = metrics[f"reward/{outcome}"]
        self.count += 1
        self.first = [*self.first, row][:FIRST]
        self.recent = [*self.recent, row][-max(RECENT, self.patience) :]
        outcome_mean = self.mean(OUTCOME, SHORT_WINDOW)
        if outcome_mean >= self.best.get("outcome", -math.inf):
            self.best = {"outcome": outcome_mean, "total": self.mean(TOTAL, SHORT_WINDOW)}

    def add_validation(self, pass_at_1: float) -> None:
        """Add a validation."""
        total = _mean(self.recent[-WINDOW:], TOTAL)
        if pass_at_1 >= self.validation.get("best", -1.0):
            self.validation = {"best": pass_at_1} | ({} if math.isnan(total) else {"total": total})
        self.validation["newest"] = pass_at_1

    def mean(self, name: str, rollouts: int = WINDOW, *, before: int = 0) -> float:
        """The mean of a metric over the last ``rollouts``, or as many ``before`` those; NaN without as many values."""
        rows = self.recent[-before - rollouts : len(self.recent) - before]
        return _mean(rows, name) if len(rows) == rollouts else math.nan

    def start(self, name: str, rollouts: int = 3) -> float:
        """The mean of a metric over the first ``rollouts``; NaN if a value is missing."""
        return _mean(self.first[:rollouts], name)

    def all_of_last(self, is_true: Callable[[Mapping[str, float]], bool]) -> bool:
        """Whether a condition holds in each of the last ``patience`` rollouts."""
        rows = self.recent[-self.patience :]
        return len(rows) == self.patience and all(map(is_true, rows))

    @property
    def has_improved(self) -> bool:
        """Whether the outcome is better than in the beginning: then the end of learning is no fault."""
        start = self.start(OUTCOME)
        return self.mean(OUTCOME) > start + 0.05 * max(abs(start), 0.5)


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    values = [row.get(name, math.nan) for row in rows]
    return sum(values) / len(values) if values else math.nan


def _has_equal_rewards(row: Mapping[str, float]) -> bool:
    # Advantages are exactly 0 where all rewards of a group are equal; their deviation in float32 rarely is.
    rounding = 1e-6 * max(1.0, abs(row.get(TOTAL, 0.0)))
    no_advantage = row.get("advantage/std") == 0 == row.get("advantage/mean")
    return no_advantage and row.get("reward/std", 0.0) <= rounding


def _is_flat(row: Mapping[str, float]) -> bool:
    return row.get("optim/grad_norm") == 0


def _when(is_found: bool, value: float) -> float | None:
    return value if is_found else None


def _collapse(history: HealthHistory) -> float | None:
    """The policy has left its start at once, or lost most of its outcome, and the total reward fell with it."""
    if not history.best:
        return None
    outcome, total, kl = (history.mean(name, SHORT_WINDOW) for name in (OUTCOME, TOTAL, KL))
    first, best = history.first[0], history.best["outcome"]
    if not total < max(history.best["total"], first.get(TOTAL, total)):
        return None
    if kl > 2 and outcome < max(best, first.get(OUTCOME, outcome)) / 2:
        return kl
    return outcome if outcome < best / 4 and outcome < best - 0.1 else None


def _hacking(history: HealthHistory) -> float | None:
    """The total reward is higher than where the outcome, or pass@1, was best, which has fallen by a tenth since."""
    outcome, total = history.mean(OUTCOME), history.mean(TOTAL)
    best = history.best.get("outcome", math.nan)
    if outcome < best - 0.1 * max(abs(best), 0.5) and total > history.best["total"]:
        return outcome
    validation = history.validation
    if validation and validation["newest"] < validation["best"] - 0.1:
        return validation["newest"] if total > validation.get("total", history.start(TOTAL, 1)) else None
    return None


def _truncation(history: HealthHistory) -> float | None:
    """Many completions are truncated, or clearly more than in the beginning."""
    fraction = history.mean(CUT)
    return fraction if fraction > 0.3 or fraction > history.start(CUT) + 0.1 else None


def _length(history: HealthHistory) -> float | None:
    """Completions are half as long again, and no better."""
    length = history.mean(LENGTH)
    is_longer = history.count >= 2 * WINDOW and length > 1.5 * history.start(LENGTH, FIRST)
    return length if is_longer and not history.has_improved else None


def _entropy(history: HealthHistory) -> float | None:
    """Hardly any entropy is left, although half of the groups are not all right yet or nothing was learned."""
    entropy, all_right = history.mean("policy/entropy"), history.mean("group/all_right")
    collapsed = entropy < 0.05 * history.start("policy/entropy") and all_right < 0.5
    is_stuck = entropy < 0.01 and all_right <= 1 and not history.has_improved  # NaN in runs without groups
    return entropy if collapsed or is_stuck else None


def _spikes(history: HealthHistory) -> float | None:
    """Four gradients are ten times as large as usual, now and in the beginning, or not finite."""
    recent = history.recent[-RECENT:]
    early, norms = ([r["optim/grad_norm"] for r in rows if "optim/grad_norm" in r] for rows in (history.first, recent))
    if len(norms) < RECENT:
        return None
    # single spikes of twenty times the median are part of healthy runs; clipping takes care of them
    usual = max(median(early), median(norms))
    spikes = [norm for norm in norms if norm > 10 * usual > 0]
    skipped = [row.get("optim/skipped", 0.0) for row in recent]
    return max(norms) if len(spikes) + skipped[-1] - skipped[0] >= 4 else None


@dataclass(frozen=True)
class HealthRule:
    """A fault of a run: its condition on the metrics, and what to do."""

    name: str
    metric: str
    """The metric to look at."""
    check: Callable[[HealthHistory], float | None]
    """Returns the value that shows the fault, or None."""
    message: str
    """What is wrong, with ``{value}`` and ``{patience}``."""
    advice: str
    is_fatal: bool = False
    """Whether such a run cannot recover; faults that show later are consequences."""


RULES = (
    HealthRule(
        *("all_truncated", CUT),
        lambda h: _when(h.all_of_last(lambda row: row.get(CUT) == 1 and (_has_equal_rewards(row) or _is_flat(row))), 1),
        "in each of the last {patience} rollouts all completions were cut before their end, and nothing is learned "
        "from their rewards",
        "raise rollout.max_new_tokens; a base model without end token needs rollout.stop=[TEXT], others their template",
        is_fatal=True,
    ),
    HealthRule(
        *("standstill", "reward/std"),
        lambda h: _when(h.all_of_last(_has_equal_rewards), h.recent[-1].get(TOTAL, 0.0)),
        "in each of the last {patience} rollouts all completions of a prompt had the same reward (reward/total is "
        "{value:.3g}), so that nothing is learned from them",
        "a reward with finer differences, harder or easier prompts, a larger rollout.group_size, a higher "
        "rollout.temperature",
        is_fatal=True,
    ),
    HealthRule(
        *("no_gradient", "optim/grad_norm"),
        lambda h: _when(h.all_of_last(lambda row: _is_flat(row) and not _has_equal_rewards(row)), 0),
        "the gradient was exactly 0 in each of the last {patience} rollouts although rewards differ, so that no weight "
        "moves",
        "look at policy/clip_fraction, at the loss's coefficients, at completion/truncated_fraction with "
        "rollout.mask_truncated, and whether the policy's forward pass is connected to its weights",
        is_fatal=True,
    ),
    HealthRule(
        *("learning_rate", "optim/lr", _collapse),
        "the policy has collapsed: rewards are gone, and policy/kl_divergence, or the outcome, is {value:.3g}",
        "lower optimizer.lr, by a factor of ten if it happens at once, and start anew",
        is_fatal=True,
    ),
    HealthRule(
        *("hacking", TOTAL, _hacking, "reward/total rises while the outcome falls, to {value:.3g}"),
        "lower the weight of what rises, raise loss.kl_coef, read the sample texts",
        is_fatal=True,
    ),
    HealthRule(
        *("teaching", "group/mixed"),
        lambda h: _when((mixed := h.mean("group/mixed")) < 0.2 and not h.has_improved, mixed),
        "only {value:.0%} of the last groups had right and wrong completions, and only those have signal",
        "much all_wrong: easier prompts or more samples; much all_right: harder ones",
    ),
    HealthRule(
        *("truncation", CUT, _truncation, "{value:.0%} of the last completions were truncated"),
        "raise rollout.max_new_tokens, set rollout.stop=[TEXT] if nothing ends them; or raise environment.max_turns",
    ),
    HealthRule(
        *("length", LENGTH, _length, "completions have grown to {value:.0f} tokens without becoming better"),
        "a length reward, or algorithm=dr_grpo",
    ),
    HealthRule(
        *("entropy", "policy/entropy", _entropy),
        "policy/entropy has fallen to {value:.2g} nats per token before the task is learned",
        "raise loss.entropy_coef, epsilon_high or the temperature",
    ),
    HealthRule(
        *("clipping", "policy/clip_fraction"),
        lambda h: _when((fraction := h.mean("policy/clip_fraction")) > 0.3, fraction),
        *("the clip is active on {value:.0%} of the tokens", "fewer ppo_epochs, a lower learning rate"),
    ),
    HealthRule(
        *("kl", KL),
        lambda h: _when((kl := h.mean(KL)) > 0.5 and kl > 1.5 * h.mean(KL, before=WINDOW), kl),
        "policy/kl_divergence has grown to {value:.2g} nats per token",
        "raise loss.kl_coef, lower the learning rate",
    ),
    HealthRule(
        *("spikes", "optim/grad_norm", _spikes),
        "several gradients were ten times as large as usual or not finite, the largest {value:.3g}",
        "lower the learning rate, use larger groups or more warm-up",
    ),
)
"""In the order in which they are checked."""


def new_findings(history: HealthHistory, reported: Sequence[Mapping[str, Any]]) -> list[tuple[HealthRule, float]]:
    """The rules that find something now and have not before, each with its value; none after a fatal one.

    Args:
        history: Of the run.
        reported: Earlier findings, each with the name of its "rule".
    """
    names = {finding["rule"] for finding in reported}
    findings: list[tuple[HealthRule, float]] = []
    for rule in RULES:
        if any(fatal.is_fatal and fatal.name in names for fatal in RULES):
            break
        if rule.name not in names and (value := rule.check(history)) is not None:
            findings.append((rule, value))
            names.add(rule.name)
    return findings


class UnrecoverableRun(RuntimeError):
    """A run was ended because it cannot recover; its last step is saved."""


class HealthMonitor(Callback):
    """Checks the metrics of every rollout by `RULES`, warns once of what they find, and writes ``health.json``.

    Args:
        directory: Where to write the file.
        rollouts: How many in a row without signal are a standstill.
        stop: Whether to end a run that cannot recover, as a failure, after its checkpoint is written.

    Raises:
        UnrecoverableRun: At the end of the fit, if ``stop`` has ended it.
    """

    def __init__(self, directory: str, *, rollouts: int, stop: bool) -> None:
        self.path = Path(directory) / "health.json"
        self.stop = stop
        self.findings: list[dict[str, Any]] = []
        self._history = HealthHistory(patience=rollouts)
        self._reason: str | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._write(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        rollout: Any = getattr(module, "rollout", None)
        metrics = dict(module.metrics)
        if rollout and not (module.policy.end_ids or rollout.sampling.stop or rollout.scorer.environment):
            metrics.pop(CUT, None)  # nothing could end a completion but its length
        self._history.add(metrics, rollout.scorer.outcome_name if rollout else None)
        step = module.completed_steps
        for rule, value in new_findings(self._history, self.findings):
            message = rule.message.format(value=value, patience=self._history.patience)
            finding = {"rule": rule.name, "step": step, "metric": rule.metric, "value": value, "said": message}
            self.findings.append({**finding, "advice": rule.advice, "hopeless": rule.is_fatal})
            self._write(trainer)
            text = f"step {step}: {message}; what helps: {rule.advice}"
            if trainer.is_global_zero:
                log.warning("%s", text)
            if self.stop and rule.is_fatal:
                self._reason = f"{text} (callbacks.doctor.stop=true)"
                trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        is_new = trainer.state.fn == "fit" and module.validated_at == module.completed_steps
        if is_new and "val/pass@1" in module.metrics:
            self._history.add_validation(module.metrics["val/pass@1"])

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._reason:
            raise UnrecoverableRun(self._reason)

    def state_dict(self) -> dict[str, Any]:
        return {"findings": self.findings, "history": asdict(self._history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.findings = list(state_dict["findings"])
        self._history = HealthHistory(**(state_dict["history"] | {"patience": self._history.patience}))

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            write_json(self.path, {"findings": self.findings})
