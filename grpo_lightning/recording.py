"""Recorded rollouts: one file per recorded step, gzip of lines of JSON; and training on them instead of sampling."""

import gzip
import hashlib
import json
import logging
import math
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_lightning.config.settings import format_override
from grpo_lightning.console import redact, write_atomic
from grpo_lightning.policy import Policy
from grpo_lightning.rollout import Collected, Collector
from grpo_lightning.rollout.collector import advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.types import Prompts, Rollout, Sampled, SamplingSupport, Scored, spans

log = logging.getLogger(__name__)

FORMAT = "grpo-lightning rollout 1"
"""The field "format" of a file's first line; the number changes with the meaning of a field."""
FOLDER = "rollouts"
"""Where the files are in a run directory."""

_NAME = re.compile(r"(\d{6,12})\.jsonl\.gz")


def file_name(step: int) -> str:
    """The name of a step's file."""
    return f"{step:06d}.jsonl.gz"


def find_directory(path: str | Path) -> Path:
    """The directory of the files, from itself or from its run's directory, which has to exist."""
    directory = Path(path) / FOLDER if (Path(path) / FOLDER).is_dir() else Path(path)
    if not directory.is_dir():
        raise ValueError(f"{path} is {'no directory' if directory.exists() else 'not there'}")
    return directory


def recorded_steps(directory: Path) -> dict[int, Path]:
    """The file of every recorded step, by step."""
    return {int(match[1]): path for path in sorted(directory.iterdir()) if (match := _NAME.fullmatch(path.name))}


def format_steps(steps: Collection[int]) -> str:
    """Steps in words, such as ``41 from 1 to 60``."""
    return f"{len(steps)} from {min(steps)} to {max(steps)}" if steps else "none"


def rewind(directory: Path, completed: int) -> list[Path]:
    """Remove the files of steps beyond ``completed``, which will be made again; returns what was removed."""
    steps = recorded_steps(directory) if directory.is_dir() else {}
    removed = [path for step, path in steps.items() if step > completed]
    for path in removed:
        path.unlink()
    return removed


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines to a file, which is complete or absent; the same lines make the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
    write_atomic(path, gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a file, which describes the rollout, and the others, one for each completion.

    Raises:
        ValueError: The file is damaged, or no recorded rollout; the message begins with its path.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or not readable ({error})") from error
    if not lines or lines[0].get("format") != FORMAT:
        raise ValueError(f"{path} is no recorded rollout: its first line has no format={FORMAT!r}")
    return lines[0], lines[1:]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RecordedRollout:
    """A rollout read from its file."""

    header: Mapping[str, Any]  # the first line of the file
    scored: Scored
    ref_logprobs: Tensor  # [B, T] under the reference; zeros where none was used
    logprobs: Tensor  # [B, T] as the only optimizer step computed them; the sampler's where there were several, or none


def fingerprint(policy: nn.Module) -> str:
    """A hash of the trained weights, equal if they are equal bit for bit; all processes call it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            bits = whole.detach().contiguous().view(_INTEGERS[whole.element_size()]).sum(dtype=torch.int64)
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)} {bits.item()}".encode())
    return digest.hexdigest()


def to_lines(
    header: Mapping[str, Any], scored: Scored, rollout: Rollout, logprobs: Mapping[int, Sequence[float]]
) -> list[dict[str, Any]]:
    """The lines of a file: the header, then one per completion.

    Args:
        header: Fields of the first line that the tensors do not tell.
        scored: The completions.
        rollout: The same rows, as they are trained on.
        logprobs: Row -> [T] as the only optimizer step computed them; empty where there were several.
    """
    sampled, length = scored.sampled, scored.sampled.mask.shape[1]
    width = sampled.ids.shape[1] - length
    columns = {name: _redact(values) for name, values in scored.prompts.columns.items()}
    kept = {name: values for name, values in columns.items() if _is_json(values)}
    first = {"prompts": len(scored.prompts), "group_size": scored.group_size}
    first |= {"prompt_tokens": width, "completion_tokens": length}
    names = {"rewards": [name for name in scored.rewards if name != "total"]}
    lines: list[dict[str, Any]] = [{**header, **first, **names, "columns_left_out": [*columns.keys() - kept.keys()]}]
    widths, counts = (part.sum(-1).tolist() for part in sampled.attention_mask.split([width, length], -1))
    turns, support = spans(sampled.mask) if sampled.turns else None, sampled.support
    sets = [] if support is None else support.to(torch.device("cpu")).lists()  # [B * T]
    by_token = {"old_logprobs": sampled.logprobs, "entropy": sampled.entropy}
    if header["reference"]:
        by_token["ref_logprobs"] = rollout.ref_logprobs
    values = {name: tensor.tolist() for name, tensor in {**scored.rewards, **by_token}.items()}
    ids, scores, steps, advantages = (
        tensor.tolist() for tensor in (sampled.ids, scored.scores, scored.steps, rollout.completion_advantages)
    )
    for row, (count, prompt_width) in enumerate(zip(counts, widths, strict=True)):
        group = row // scored.group_size
        line = {
            "group": group,
            "prompt": _redact(scored.prompts.texts[group]),
            "completion": redact(sampled.texts[row]),
            "columns": {name: values[group] for name, values in kept.items()},
            "rewards": {name: encode(values[name][row]) for name in scored.rewards},
            "scores": [*map(encode, scores[row])],
            "steps": [[token, encode(value)] for token, value in enumerate(steps[row]) if not math.isnan(value)],
            "advantage": encode(advantages[row]),
            "right": bool(scored.right[row]),
            "finished": sampled.finished[row],
            "prompt_ids": ids[row][width - prompt_width : width],
            "ids": ids[row][width : width + count],
            **{name: [*map(encode, values[name][row][:count])] for name in by_token},
        }
        if turns and sampled.turns and sampled.replies:
            line |= {"turns": _redact(sampled.turns[row]), "replies": _redact(sampled.replies[row])}
            line["spans"] = [list(span) for span in turns[row]]
        if sets:
            line["kept"] = sets[row * length : row * length + count]
        if row in logprobs:
            line["logprobs"] = [*map(encode, logprobs[row][:count])]
        lines.append(line)
    return lines


def from_lines(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], device: torch.device) -> RecordedRollout:
    """The rollout that `to_lines` described, with samples on ``device`` and rewards on the CPU."""
    width, length, total = header["prompt_tokens"], header["completion_tokens"], len(rows)

    def pad(values: Iterable[Sequence[Any]], filler: Any, size: int = length, *, left: bool = False) -> Tensor:
        """[B, size] of the values of every row."""
        padded = ((row, [filler] * (size - len(row))) for row in values)
        return torch.tensor([[*fill, *row] if left else [*row, *fill] for row, fill in padded])

    def floats(*names: str) -> Tensor:
        """[B, T] of the first of some fields that a row has."""
        fields = (next((row[name] for name in names if name in row), ()) for row in rows)
        return pad(([*map(decode, values)] for values in fields), 0.0).to(device)

    prompt_ids = pad((row["prompt_ids"] for row in rows), 0, width, left=True)
    prompt_mask = pad(([True] * len(row["prompt_ids"]) for row in rows), False, width, left=True)
    present = pad(([True] * len(row["ids"]) for row in rows), False)
    mask, steps = present.clone(), torch.full((total, length), torch.nan)
    for number, row in enumerate(rows):
        for (_, end), (start, _) in pairwise(row.get("spans", ())):
            mask[number, end:start] = False
        for token, score in row["steps"]:
            steps[number, token] = decode(score)

    def texts(name: str) -> tuple[tuple[str, ...], ...] | None:
        return tuple(tuple(row[name]) for row in rows) if all(name in row for row in rows) else None

    sets, support = [row.get("kept", []) for row in rows], None
    if any(sets):
        sizes = pad(([len(tokens) for tokens in row] for row in sets), 0)
        kept = torch.tensor([token for row in sets for tokens in row for token in tokens])
        support = SamplingSupport(sizes.int(), kept.int()).to(device)
    sampled = Sampled(
        ids=torch.cat([prompt_ids, pad((row["ids"] for row in rows), 0)], 1).to(device),
        attention_mask=torch.cat([prompt_mask, present], 1).to(device),
        mask=mask.to(device),
        logprobs=floats("old_logprobs"),
        entropy=floats("entropy"),
        texts=tuple(row["completion"] for row in rows),
        finished=tuple(row["finished"] for row in rows),
        support=support,
        turns=texts("turns"),
        replies=texts("replies"),
    )
    firsts = rows[:: header["group_size"]]
    scored = Scored(
        prompts=Prompts(
            tuple(row["prompt"] for row in firsts),
            {name: tuple(row["columns"][name] for row in firsts) for name in sorted(firsts[0]["columns"])},
        ),
        sampled=sampled,
        rewards={name: _floats(row["rewards"][name] for row in rows) for name in (*header["rewards"], "total")},
        right=torch.tensor([row["right"] for row in rows]),
        scores=torch.stack([_floats(row["scores"]) for row in rows]),
        steps=steps,
    )
    return RecordedRollout(header, scored, floats("ref_logprobs"), floats("logprobs", "old_logprobs"))


def encode(value: float) -> float | str | None:
    """A float32 for JSON: nine digits, which tell it from every other; null for NaN, "inf" and "-inf"."""
    if math.isnan(value):
        return None
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


def decode(written: float | str | None) -> float:
    """What `encode` wrote."""
    return math.nan if written is None else float(written)


def _floats(written: Iterable[float | str | None]) -> Tensor:
    return torch.tensor([*map(decode, written)])


def _redact(value: Any) -> Any:
    """A prompt or a column without secrets."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _redact(item) for key, item in value.items()}
    return [_redact(item) for item in value] if isinstance(value, list | tuple) else value


def _is_json(values: Any) -> bool:
    """Whether JSON can hold a column: no object, date, or mapping whose keys are numbers."""
    try:
        return bool(json.loads(json.dumps(values, allow_nan=False)) == values)
    except (TypeError, ValueError, RecursionError):
        return False


@dataclass(frozen=True, kw_only=True)
class RecordedCollector(Collector):
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
        context: StepContext,
        carried: Scored | None = None,
    ) -> Collected:
        """The recorded rollout of the step that ``context`` names, instead of one of ``prompts``.

        Arguments and returns are those of `Collector.collect`; the reference scores only what has no scores of one.

        Raises:
            ValueError: There is no rollout of the step, its file is damaged, or it was made otherwise than set now.
        """
        with context.clock("rollout"):
            found = self._found(context.step + 1, next(policy.parameters()).device)
        header, scored, scoring = found.header, found.scored, dict[str, float]()
        support, shape = scored.sampled.support, policy.shape()
        largest = max(int(ids.max()) for ids in (scored.sampled.ids, *([support.ids] if support else [])))
        if shape is not None and largest >= shape.vocabulary:
            raise ValueError(
                f"rollout.path={self.path}: token {largest} in step {header['step']}; the policy has {shape.vocabulary}"
            )
        if self.rescore:
            scored, scoring = self.scorer.score(
                policy.token_at, scored.prompts, scored.sampled, context=context, opening=policy.chat.opening
            )
        ref_logprobs = found.ref_logprobs
        if reference is not None and not header["reference"]:
            with context.clock("score"):
                ref_logprobs = self.ref_logprobs(reference, scored.sampled, context)
        is_same = fingerprint(policy) == header["policy"]
        if not is_same and context.step == 0:
            log.warning(
                "rollout.path=%s: sampled by another policy than the one that is trained; ratios are to that policy",
                self.path,
            )
        rollout = self.compare(scored, ref_logprobs)
        metrics = {name: torch.tensor(decode(value)) for name, value in header["collected"].items()}
        if self.rescore:
            metrics |= sampled_metrics(scored) | {name: torch.tensor(value) for name, value in scoring.items()}
        metrics |= token_metrics(scored, ref_logprobs, has_reference=reference is not None)
        metrics |= advantage_metrics(rollout.completion_advantages)
        return Collected(
            rollout=rollout,
            scored=scored,
            metrics=metrics,
            carried=None,
            num_tokens=header["num_tokens"],
            flops=0.0,
            is_fresh=is_same and header["fresh"],
        )

    def _found(self, step: int, device: torch.device) -> RecordedRollout:
        """The rollout of a step; what was made otherwise than the settings say, where that would pass unseen, fails."""
        try:
            known = recorded_steps(find_directory(self.path))
            if step not in known:
                raise ValueError(f"has no rollout of step {step}; there are {format_steps(known)}")
            header, rows = read(known[step])
        except ValueError as error:
            raise ValueError(f"rollout.path={self.path}: {error}") from error
        settings: list[tuple[str, Any, Any]] = [("rollout.temperature", self.temperature, header["temperature"])]
        hint = ""
        if not self.rescore:
            hint = " (rollout.rescore=true computes rewards anew)"
            settings.append(("reward", list(self.reward), header["rewards"]))
            weights = zip(header["rewards"], self.scorer.weights.tolist(), header["weights"], strict=False)
            settings += [(f"reward.{name}.weight", weight, then) for name, weight, then in weights]
        for key, value, then in settings:
            if value != then:
                numbers = (float(f"{one:g}") if isinstance(one, float) else one for one in (value, then))
                wrong, allowed = (format_override(key, one) for one in numbers)
                raise ValueError(f"{wrong}: allowed is {allowed}, as in {known[step]}{hint}")
        return from_lines(header, rows, device)
