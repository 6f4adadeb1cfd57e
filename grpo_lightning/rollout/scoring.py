"""Generate completions, of one turn or several, and score them with the rewards; processes divide the work."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lightning import reward
from grpo_lightning.console import redact, single_line
from grpo_lightning.distributed.ranks import SINGLE_PROCESS, Ranks
from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec, Scoring
from grpo_lightning.reward.accuracy import of_environment, prefill, reasoning_gym
from grpo_lightning.reward.spec import ARGUMENTS, Score, arguments, clip_scores, innermost, is_missing, scalar, total
from grpo_lightning.sampler import Poll, Sampler
from grpo_lightning.sampler.native import NativeSampler
from grpo_lightning.types import Clock, Prompt, Prompts, Sampled, Sampling, Scored, spans

if TYPE_CHECKING:
    from grpo_lightning.environment import Environment, Episodes

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_SHOWN_CHARACTERS = 300  # of the end of a prompt or completion
_CHECKED_ROWS = 1000  # of the training prompts, the first
_FILE_ONLY = {"printed": True}  # in the log file, and not on the terminal

COLUMNS = ("turns", "replies", "episode_tokens", "turn_scores")
"""What rewards may ask for besides the columns of the data."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The seed of a step's samples, and the step's sampler, clock and processes.

    Example:
        ``StepContext(seed=7)`` is all that a rollout in a script of one's own needs.
    """

    seed: int
    """Decides everything that is sampled, in [0, 2^64)."""
    step: int = 0
    """Steps completed before."""
    clock: Clock = field(default_factory=Clock)
    """Adds up the seconds of each phase: the metrics ``time/…``."""
    poll: Poll | None = None
    """Called between generated tokens; may raise to abandon the sampling."""
    microbatch_tokens: int = 16_384
    """Most tokens in one forward pass that scores."""
    ranks: Ranks = SINGLE_PROCESS
    """The processes that divide the work among them."""
    sampler: Sampler = field(default_factory=NativeSampler)
    """Generates the completions."""


Opening = Callable[[Prompt], str]
"""A prompt -> what it has written of the model's turn, as ``policy.chat.opening``."""
TokenAt = Callable[[Sequence[int], int], int]
"""(token ids, end) -> the token that the character before ``end`` of their text belongs to, as ``Policy.token_at``."""


@dataclass(frozen=True)
class Scorer:
    """Generates completions and scores them; holds settings, never weights."""

    rewards: Mapping[str, RewardSpec]
    """Name -> function and weight."""
    outcome: str | None
    """The reward that decides whether a completion is right; None takes ``accuracy`` or, without one, the first."""
    threshold: float
    """Its least score that counts as right."""
    environment: "Environment | None" = None
    """Environment for multi-turn rollouts, or None for single-turn."""

    @property
    def outcome_name(self) -> str:
        """The reward that decides whether a completion is right."""
        return self.outcome or ("accuracy" if "accuracy" in self.rewards else next(iter(self.rewards)))

    @property
    def weights(self) -> Tensor:
        """[K] of the rewards."""
        return torch.tensor([reward.factor for reward in self.rewards.values()])

    def generate_and_score(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        sampling: Sampling,
        context: StepContext,
        first_prompt: int = 0,
    ) -> tuple[Scored, dict[str, float]]:
        """Generate ``group_size`` completions per prompt and score them; arguments as in `Sampler.generate`.

        Every process does so for its share of the prompts and receives the results of all. Rewards with a timeout start
        on a completion as soon as it has ended. The metrics are the failures of rewards and the environment's own.
        """
        ranks, shard = context.ranks, context.ranks.shard_range(len(prompts))
        local, first_prompt = prompts[shard], first_prompt + shard.start

        def work() -> tuple[Scored, dict[str, float], torch.device]:
            episodes = self._episodes(local, group_size, first_prompt, context)
            # What happened in episodes is known only when they are over.
            opening = policy.chat.opening
            scoring = self._scoring(local, group_size, context, opening) if episodes is None else None
            with context.clock("rollout"):
                sampled = context.sampler.generate(
                    policy,
                    local.texts,
                    group_size=group_size,
                    sampling=sampling,
                    seed=context.seed,
                    first_prompt=first_prompt,
                    poll=context.poll,
                    on_finished=scoring.begin if scoring and scoring.may_begin else None,
                    responder=episodes,
                )
            if episodes is not None:
                context.clock.move(episodes.seconds, "rollout", "environment")
                finished = tuple(own and over for own, over in zip(sampled.finished, episodes.over, strict=True))
                sampled = replace(sampled, finished=finished)
            scored, metrics = self._score(policy.token_at, local, sampled, scoring, episodes, context, opening)
            return scored.to(_CPU) if ranks.size > 1 else scored, metrics, sampled.mask.device

        parts = ranks.all_or_raise(work, waiting=context.clock("wait"))
        return _concatenate([(scored, metrics) for scored, metrics, _ in parts], parts[ranks.rank][2])

    def score(
        self,
        token_at: TokenAt,
        prompts: Prompts,
        sampled: Sampled,
        *,
        context: StepContext,
        opening: Opening = lambda _: "",
    ) -> tuple[Scored, dict[str, float]]:
        """Score completions [B] of prompts [P] that were sampled before, as `generate_and_score` does."""
        ranks, group_size = context.ranks, len(sampled) // len(prompts)

        def work() -> tuple[Scored, dict[str, float]]:
            shard = ranks.shard_range(len(prompts))
            rows = torch.arange(shard.start * group_size, shard.stop * group_size, device=sampled.mask.device)
            scored, metrics = self._score(token_at, prompts[shard], sampled[rows], None, None, context, opening)
            return scored.to(_CPU) if ranks.size > 1 else scored, metrics

        return _concatenate(ranks.all_or_raise(work, waiting=context.clock("wait")), sampled.mask.device)

    def _episodes(
        self, prompts: Prompts, group_size: int, first_prompt: int, context: StepContext
    ) -> "Episodes | None":
        """One new episode per completion; None without an environment."""
        if self.environment is None:
            return None
        from grpo_lightning.environment import Episodes

        rows = range(len(prompts) * group_size)
        seeds = [(context.seed, first_prompt + row // group_size, row % group_size) for row in rows]
        columns = {name: _per_row(values, group_size) for name, values in prompts.columns.items()}
        return Episodes(self.environment, _per_row(prompts.texts, group_size), columns, seeds, context.poll)

    def _scoring(
        self, prompts: Prompts, group_size: int, context: StepContext, opening: Opening, **turn_columns: Sequence[Any]
    ) -> Scoring:
        columns = {name: _per_row(values, group_size) for name, values in prompts.columns.items()} | turn_columns
        prefills = _per_row([prefill(opening(prompt)) for prompt in prompts.texts], group_size)
        return Scoring(self.rewards, _per_row(prompts.texts, group_size), columns, context.poll, prefills)

    def _score(
        self,
        token_at: TokenAt,
        prompts: Prompts,
        sampled: Sampled,
        scoring: Scoring | None,
        episodes: "Episodes | None",
        context: StepContext,
        opening: Opening,
    ) -> tuple[Scored, dict[str, float]]:
        with context.clock("reward"):
            if episodes is not None:
                episodes.check()
            if scoring is None:
                group_size = len(sampled) // len(prompts)
                scoring = self._scoring(prompts, group_size, context, opening, **_turn_columns(sampled, episodes))
            turns = turn_spans(sampled)
            completions = sampled.ids[:, -sampled.mask.shape[1] :].tolist()
            ids = [row[slice(*spans[-1])] for row, spans in zip(completions, turns, strict=True)]  # of the last turn
            scores = scoring.finish(sampled.texts, ids)
            values = {name: list(given) for name, given in scores.values.items()}
            if episodes is not None and self.environment is not None:
                for row, problem in enumerate(episodes.failed):
                    for name in values if problem is not None else ():  # no other reward applies
                        own = _is_of_environment(self.rewards[name])
                        values[name][row] = self.environment.failed_score if own else None
            clipped = clip_scores(self.rewards, values)
            raw = {name: [scalar(value) for value in given] for name, given in values.items()}
            raw["total"] = total(self.rewards, clipped)
            rewards = {name: _tensor(given) for name, given in raw.items()}
            steps = torch.full(tuple(sampled.mask.shape), torch.nan)
            for name, given in clipped.items():
                by_turn = episodes.scores if episodes and _is_of_environment(self.rewards[name]) else None
                for row, value in enumerate(given):
                    turn_scores = None if by_turn is None else by_turn[row]
                    for token, score in _token_scores(value, ids[row], turns[row], token_at, turn_scores):
                        steps[row, token] = steps[row, token].nan_to_num(0.0) + self.rewards[name].factor * score
            scored = Scored(
                prompts,
                sampled,
                rewards,
                right=rewards[self.outcome_name] >= self.threshold,
                scores=torch.stack([_tensor([scalar(v) for v in given]) for given in clipped.values()], -1),
                steps=steps,
            )
        metrics = {f"failure/{name}": fraction for name, fraction in scores.failed.items()}
        return scored, metrics | ({} if episodes is None else episodes.metrics)


def _token_scores(
    value: Score,
    ids: Sequence[int],
    turns: Sequence[tuple[int, int]],
    token_at: TokenAt,
    turn_scores: Sequence[tuple[int, float]] | None,
) -> list[tuple[int, float]]:
    """(token, score) pairs of a completion: one at its end, or one for each scored step or turn."""
    if value is None:
        return []
    if isinstance(value, tuple):
        return [(turns[-1][0] + token_at(ids, end), score) for end, score in value]
    if turn_scores and value == of_environment([turn_scores])[0]:  # else clipping has changed the sum
        return [(turns[number][1] - 1, score) for number, score in turn_scores]
    return [(turns[-1][1] - 1, value)]


def _concatenate(
    parts: Sequence[tuple[Scored, dict[str, float]]], device: torch.device
) -> tuple[Scored, dict[str, float]]:
    """What the processes scored, by rank, as one; metrics are weighted by the completions of their process."""
    sizes = [len(scored.right) for scored, _ in parts]
    metrics = {
        name: sum(values[name] * size for (_, values), size in zip(parts, sizes, strict=True)) / sum(sizes)
        for name in parts[0][1]
    }
    return Scored.concatenate([scored for scored, _ in parts]).to(device), metrics


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values])


def _per_row(values: Sequence[Any], group_size: int) -> list[Any]:
    """[P] -> [P * G], every value ``group_size`` times in a row."""
    return list(chain.from_iterable(repeat(value, group_size) for value in values))


def check_columns(
    rewards: Mapping[str, RewardSpec], environment: "Environment | None", column_names: Collection[str]
) -> None:
    """Check that every reward and the environment can be called with these columns of the data."""
    if environment is None:
        reward.check_columns(rewards, column_names)
        return
    from grpo_lightning.environment import EpisodeError, check_columns

    if taken := sorted({*COLUMNS} & {*column_names}):
        raise EpisodeError(
            f"column {taken[0]!r} of the data has the name of a column that multi-turn rollouts pass to rewards "
            f"({', '.join(COLUMNS)}): rename it"
        )
    check_columns(environment, column_names)
    reward.check_columns(rewards, [*column_names, *COLUMNS])


def _turn_columns(sampled: Sampled, episodes: "Episodes | None") -> dict[str, Sequence[Any]]:
    """`COLUMNS` by name, [B] each; recorded completions have no scores of turns, single-turn ones no columns."""
    if sampled.turns is None or sampled.replies is None:
        return {}
    columns: dict[str, Sequence[Any]] = {
        "turns": [list(texts) for texts in sampled.turns],
        "replies": [list(texts) for texts in sampled.replies],
        "episode_tokens": sampled.attention_mask[:, -sampled.mask.shape[1] :].sum(-1).tolist(),
    }
    return columns if episodes is None else {**columns, "turn_scores": episodes.scores}


def _is_of_environment(reward: RewardSpec) -> bool:
    """Whether a reward is the environment's own."""
    function: Callable[..., Any] = reward.function
    return (function.func if isinstance(function, partial) else function) is of_environment


def turn_spans(sampled: Sampled) -> list[list[tuple[int, int]]]:
    """[B] the first token of every turn, and its end; single-turn completions have one, which may be empty."""
    turns = [row or [(0, 0)] for row in spans(sampled.mask)]
    return turns if sampled.turns is not None else [[(0, row[-1][1])] for row in turns]


def describe_prompt(policy: Policy, ids: Sequence[int]) -> str:
    """A prompt as the model reads it: the end of its text on one line, special tokens included."""
    return f"prompt, {len(ids)} tokens: {_visible(policy, ids)}"


def describe_examples(policy: Policy, scored: Scored, number: int) -> Iterator[str]:
    """The prompts of the first groups as the model read them, each with one completion and its rewards."""
    sampled, width = scored.sampled, scored.sampled.ids.shape[1] - scored.sampled.mask.shape[1]
    for row in range(0, len(sampled), scored.group_size)[:number]:
        ids, is_real = sampled.ids[row], sampled.attention_mask[row]
        yield describe_prompt(policy, ids[:width][is_real[:width]].tolist())
        completion = ids[width:][is_real[width:]].tolist()
        end = "" if sampled.finished[row] else ", truncated"
        yield f"completion, {len(completion)} tokens{end}: {_visible(policy, completion)}"
        scores = {name: float(values[row]) for name, values in scored.rewards.items()}
        yield "rewards: " + ", ".join(f"{name} {'None' if s != s else f'{s:g}'}" for name, s in scores.items())


def log_to_file(lines: Iterator[str]) -> None:
    """Write lines to the log file of the run, if there is one, and not to the terminal."""
    for line in lines:
        log.info("%s", line, extra=_FILE_ONLY)


def _visible(policy: Policy, ids: Sequence[int]) -> str:
    text = redact(policy.tokenizer.decode(list(ids), skip_special_tokens=False))
    return "…" * (len(text) > _SHOWN_CHARACTERS) + single_line(text[-_SHOWN_CHARACTERS:])


def unscored_rows(rewards: Mapping[str, RewardSpec], source: Any) -> list[str]:
    """What to warn of before the first step: how many rows have no value in a column that a shipped reward needs.

    Functions of the user's own may do without a value, and so may reasoning_gym's tasks.
    """
    known = dict.fromkeys((*ARGUMENTS, *COLUMNS))
    required = {}
    for name, spec in rewards.items():
        function = innermost(spec.function)
        is_strict = str(function.__module__).startswith("grpo_lightning.") and function is not reasoning_gym
        required[name] = arguments(spec.function, known)[0] if is_strict else []
    if not any(required.values()):
        return []
    rows = [source[i][1] for i in range(min(len(source), _CHECKED_ROWS))]
    warnings, applies = [], [False] * len(rows)
    for name, columns in required.items():
        lacks = [[column for column in columns if is_missing(row[column])] for row in rows]
        applies = [before or not lacking for before, lacking in zip(applies, lacks, strict=True)]
        if count := sum(map(bool, lacks)):
            text = ", ".join(sorted({*chain.from_iterable(lacks)}))
            warnings.append(f"reward {name} does not apply to {count} of {len(rows)} training prompts, without {text}")
    if unscored := applies.count(False):
        warnings.append(
            f"no reward applies to {unscored} of {len(rows)} training prompts, which teach nothing: leave them out, or "
            "add a reward that applies"
        )
    return warnings


def show_inputs(policy: Policy, rewards: Mapping[str, RewardSpec], source: Any) -> None:
    """Before the first step: the first training prompt to the log file, and warnings of rows without a right answer."""
    form = "by the chat template" if policy.chat.uses_template else "as plain text, without a chat template"
    log_to_file(iter([f"prompts are written {form}", describe_prompt(policy, policy.tokenize([source[0][0]])[0])]))
    for warning in unscored_rows(rewards, source):
        log.warning("%s", warning)
