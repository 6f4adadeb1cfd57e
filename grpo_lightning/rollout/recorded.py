"""Rollouts recorded by another run, instead of sampling."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from grpo_lightning import recording
from grpo_lightning.config.settings import format_override
from grpo_lightning.policy import Policy
from grpo_lightning.recording import RecordedRollout, fingerprint, from_lines
from grpo_lightning.rollout.collector import Collected, Collector, advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.types import Prompts, Scored

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recorded(Collector):
    """Reads each step's completions from a file and computes their advantages with the present settings.

    If the policy equals, bit for bit, the one that sampled them, the update is the recorded run's; otherwise ratios are
    those to the policy that sampled. Which groups and completions are trained on was decided by the recorded run.
    """

    path: str
    """A run directory, or its directory of rollouts."""
    rescore: bool = False
    """Whether the rewards are computed anew; else they are the recorded ones."""

    @torch.no_grad()
    def collect(
        self,
        policy: Policy,
        reference: Policy | None,
        prompts: Prompts,
        *,
        microbatch_tokens: int,
        context: StepContext,
        carried: Scored | None = None,
    ) -> Collected:
        """The recorded rollout of the step that ``context`` names; arguments and returns as in `Collector.collect`.

        Args:
            policy: Compared with the one that sampled.
            reference: Scores the completions if no reference was recorded.
            prompts: Ignored: those of the recorded rollout are used.
            microbatch_tokens: Most tokens in one forward pass of the reference.
            context: Its step is read.
            carried: Ignored.

        Raises:
            ValueError: There is no rollout of the step, its file is damaged, or it was made otherwise than set now.
        """
        with context.clock("rollout"):
            found = self._found(context.step + 1, next(policy.parameters()).device)
        header, scored, told = found.header, found.scored, dict[str, float]()
        support = scored.sampled.support
        largest = max(int(ids.max()) for ids in (scored.sampled.ids, *([support.ids] if support else [])))
        if largest >= (size := _vocabulary(policy)):
            raise ValueError(
                f"rollout.path={self.path}: token {largest} in step {header['step']}; the policy has {size}"
            )
        if self.rescore:
            scored, told = self.scorer.score(policy, scored.prompts, scored.sampled, context=context)
        ref_logprobs = found.ref_logprobs
        if reference is not None and not header["reference"]:
            with context.clock("score"):
                ref_logprobs = self.ref_logprobs(reference, scored.sampled, microbatch_tokens, context)
        same = fingerprint(policy) == header["policy"]
        if not same and context.step == 0:
            log.warning(
                "rollout.path=%s: sampled by another policy than the one that is trained; ratios are to that policy",
                self.path,
            )
        rollout = self.compare(scored, ref_logprobs)
        metrics = {name: _scalar(value) for name, value in header["collected"].items()}
        if self.rescore:
            metrics |= sampled_metrics(scored) | {name: _scalar(value) for name, value in told.items()}
        metrics |= token_metrics(scored, ref_logprobs, has_reference=reference is not None)
        metrics |= advantage_metrics(rollout.mean_advantages)
        return Collected(
            rollout=rollout,
            scored=scored,
            metrics=metrics,
            carried=None,
            num_tokens=header["num_tokens"],
            flops=0.0,
            is_fresh=same and header["fresh"],
        )

    def _found(self, step: int, device: torch.device) -> RecordedRollout:
        try:
            known = recording.recorded_steps(recording.find_directory(self.path))
            if step not in known:
                raise ValueError(f"has no rollout of step {step}; there are {recording.format_steps(known)}")
            header, rows = recording.read(known[step])
        except ValueError as error:
            raise ValueError(f"rollout.path={self.path}: {error}") from error
        self._check(header, known[step])
        return from_lines(header, rows, device)

    def _check(self, header: dict[str, float], path: Path) -> None:
        """Refuse what was made otherwise than the settings say, where that would pass unseen."""
        if header["temperature"] != self.temperature:
            raise ValueError(
                f"rollout.temperature={self.temperature}: allowed is {header['temperature']}, that of {path}"
            )
        if self.rescore:
            return
        names: Sequence[str] = header["rewards"]  # type: ignore[assignment]
        weights: Sequence[float] = header["weights"]  # type: ignore[assignment]
        told = " (rollout.rescore=true computes rewards anew)"
        if list(names) != list(self.reward):
            allowed = format_override("reward", names)
            raise ValueError(f"reward=[{','.join(self.reward)}]: allowed is {allowed}, as in {path}{told}")
        for name, then, now in zip(names, weights, self.scorer.weights.tolist(), strict=True):
            if then != now:
                raise ValueError(f"reward.{name}.weight={now:g}: allowed is {then:g}, as in {path}{told}")


def _vocabulary(policy: Policy) -> int:
    """How many tokens the policy has; any number where it does not say."""
    shape = policy.shape()
    return shape.vocabulary if shape else 1 << 62


def _scalar(value: float | None) -> Tensor:
    return torch.tensor(torch.nan if value is None else value)
