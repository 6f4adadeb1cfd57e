"""Validation on held-out prompts, with its own sampling: pass@1, pass@k, maj@k and the rewards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb, nan
from typing import TYPE_CHECKING, Any

from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.reward.accuracy import answer_text, prefill, prepend_prefills
from grpo_lightning.rollout.scoring import Scorer, StepContext
from grpo_lightning.schedule import resolve_schedules
from grpo_lightning.types import Prompts, Sampling, Scored, by_source

if TYPE_CHECKING:
    from grpo_lightning.environment import Environment


def pass_at_k(right: Sequence[bool], k: int) -> float:
    """The chance that at least one of k samples is right, estimated without bias from n >= k samples of a prompt.

    1 - C(n - c, k) / C(n, k), arXiv:2107.03374, Eq. 1, with c of the n samples right.
    """
    return 1 - comb(len(right) - sum(right), k) / comb(len(right), k)


def majority_at_k(right: Sequence[bool], answers: Sequence[str], k: int) -> float:
    """The chance that the commonest answer among a prompt's first k samples is right; a tied one is drawn.

    arXiv:2203.11171 (self-consistency).
    """
    votes = Counter(answers[:k])
    verdicts = dict(zip(answers[:k], right, strict=False))
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(verdicts[answer] for answer in winners) / len(winners)


class Validation:
    """Collects metrics over the held-out prompts.

    Args:
        reward: The rewards by name, the same as in training.
        outcome: As in `Scorer`, like ``threshold`` and ``environment``.
        threshold: The outcome reward's least score that counts as right.
        every: Steps between validations; the data and the module read it.
        samples_per_prompt: Completions per prompt, n.
        ks: pass@k and maj@k are reported for these, each at most n; pass@1 always is.
        environment: Environment for multi-turn rollouts, or None for single-turn.
        sampling: The fields of `Sampling`; temperature 0 takes the likeliest token.
    """

    def __init__(
        self,
        reward: Mapping[str, RewardSpec],
        outcome: str | None,
        threshold: float,
        *,
        every: int,
        samples_per_prompt: int,
        ks: Sequence[int],
        environment: "Environment | None" = None,
        **sampling: Any,
    ) -> None:
        self.scorer = Scorer(reward, outcome, threshold, environment)
        self.seen = 0
        self.every = every
        self.samples_per_prompt = samples_per_prompt
        self.sampling = Sampling(**sampling)
        self.ks = sorted({1, *ks})
        self._counted: dict[str, list[float]] = {}
        """By metric a value for each prompt or completion that its reward applies to, since the last `compute`."""

    def step(self, policy: Policy, prompts: Prompts, *, completed_steps: int, context: StepContext) -> Scored:
        """Sample completions of the next held-out prompts and count them; weights that vary are of the next step."""
        scored, _ = resolve_schedules(self.scorer, completed_steps).generate_and_score(
            policy,
            prompts,
            group_size=self.samples_per_prompt,
            sampling=self.sampling,
            context=context,
            first_prompt=self.seen,
        )
        self.seen += len(prompts)
        size = self.samples_per_prompt
        prefills = [prefill(policy.chat.opening(prompt)) for prompt in prompts.texts for _ in range(size)]
        answers = [answer_text(text) for text in prepend_prefills(scored.sampled.texts, prefills)]
        sources = by_source(prompts)
        applies = scored.rewards[self.scorer.outcome_name].isfinite().view(-1, size).any(-1).tolist()
        for group, right in enumerate(scored.right.view(-1, size).tolist()):
            found = {f"val/pass@{k}": pass_at_k(right, k) for k in self.ks}
            found |= {f"val/{source}/pass@1": found["val/pass@1"] for source in sources if group in sources[source]}
            found |= {f"val/maj@{k}": majority_at_k(right, answers[group * size :], k) for k in self.ks[1:]}
            for name, fraction in found.items():
                self._count(name, *[fraction] * applies[group])
        for name, values in scored.rewards.items():
            self._count(f"val/reward/{name}", *values[~values.isnan()].tolist())
        return scored

    def _count(self, name: str, *values: float) -> None:
        self._counted.setdefault(name, []).extend(values)

    def compute(self) -> dict[str, float]:
        """The means over everything counted since the last call, by name; NaN where no reward applied."""
        means = {name: sum(values) / len(values) if values else nan for name, values in self._counted.items()}
        self.seen, self._counted = 0, {}
        return means
