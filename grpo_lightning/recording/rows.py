"""A rollout as the lines of its file, and back; every float32 comes back as it was."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_lightning.config.redaction import redact
from grpo_lightning.types import Prompts, Rollout, Sampled, SamplingSupport, Scored, spans

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Restored:
    """A recorded rollout."""

    header: Mapping[str, Any]
    """The first line of its file."""
    scored: Scored
    ref_logprobs: Tensor
    """[B, T] under the reference; zeros where none was used."""
    logprobs: Tensor
    """[B, T] as the only optimizer step computed them; the sampler's where it did not, or where there were several."""


def fingerprint(policy: nn.Module) -> str:
    """A text that two policies share if all their trained weights are equal, bit for bit; all processes call it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            bits = whole.detach().contiguous().view(_BITS[whole.element_size()]).sum(dtype=torch.int64)
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)} {bits.item()}".encode())
    return digest.hexdigest()


def lines(
    header: Mapping[str, Any], scored: Scored, rollout: Rollout, logprobs: Mapping[int, Sequence[float]]
) -> list[dict[str, Any]]:
    """The lines of a file: what is known of the whole, then a completion each.

    Args:
        header: What these tensors do not tell.
        scored: The completions.
        rollout: The same rows, as they are trained on.
        logprobs: Row -> [T] as the only optimizer step computed them; nothing where there were several.
    """
    sampled, length = scored.sampled, scored.sampled.mask.shape[1]
    width = sampled.ids.shape[1] - length
    columns, left_out = _columns(scored.prompts)
    first = {
        **header,
        "prompts": len(scored.prompts),
        "group_size": scored.group_size,
        "prompt_tokens": width,
        "completion_tokens": length,
        "rewards": [name for name in scored.rewards if name != "total"],
        "columns_left_out": left_out,
    }
    counts, widths = (part.sum(-1).tolist() for part in sampled.attention_mask.split([width, length], -1)[::-1])
    ids, old, entropy, ref = (
        values.tolist() for values in (sampled.ids, sampled.logprobs, sampled.entropy, rollout.ref_logprobs)
    )
    turns = spans(sampled.mask) if sampled.turns else None
    kept = sampled.support
    sets = [] if kept is None else [part.lists() for part in kept.to(torch.device("cpu")).each(counts)]
    rewards = {name: values.tolist() for name, values in scored.rewards.items()}
    scores, steps, advantages = scored.scores.tolist(), scored.steps.tolist(), rollout.mean_advantages.tolist()
    made: list[dict[str, Any]] = [first]
    for row, (count, given) in enumerate(zip(counts, widths, strict=True)):
        group = row // scored.group_size
        line = {
            "group": group,
            "prompt": _hidden(scored.prompts.texts[group]),
            "completion": redact(sampled.texts[row]),
            "columns": columns[group],
            "rewards": {name: number(values[row]) for name, values in rewards.items()},
            "scores": [number(value) for value in scores[row]],
            "steps": [[token, number(value)] for token, value in enumerate(steps[row]) if not math.isnan(value)],
            "advantage": number(advantages[row]),
            "right": bool(scored.right[row]),
            "finished": sampled.finished[row],
            "prompt_ids": ids[row][width - given : width],
            "ids": ids[row][width : width + count],
            "old_logprobs": [number(value) for value in old[row][:count]],
            "entropy": [number(value) for value in entropy[row][:count]],
        }
        if turns and sampled.turns and sampled.replies:
            line |= {"turns": _hidden(sampled.turns[row]), "replies": _hidden(sampled.replies[row])}
            line["spans"] = [list(span) for span in turns[row]]
        if sets:
            line["kept"] = sets[row]
        if header["reference"]:
            line["ref_logprobs"] = [number(value) for value in ref[row][:count]]
        if row in logprobs:
            line["logprobs"] = [number(value) for value in logprobs[row][:count]]
        made.append(line)
    return made


def restored(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], device: torch.device) -> Restored:
    """The rollout that `lines` described; samples on ``device``, rewards on the CPU.

    Args:
        header: The first line of a file.
        rows: The other lines.
        device: Of the token ids and log-probabilities.
    """
    width, length = header["prompt_tokens"], header["completion_tokens"]
    total, size = len(rows), header["group_size"]
    counts = torch.tensor([len(row["ids"]) for row in rows])
    widths = torch.tensor([len(row["prompt_ids"]) for row in rows])
    seen = torch.arange(length) < counts.unsqueeze(-1)
    mask = seen.clone()
    for row, line in enumerate(rows):
        for (_, end), (start, _) in pairwise(line.get("spans", ())):
            mask[row, end:start] = False
    prompt_mask = torch.arange(width) >= width - widths.unsqueeze(-1)
    ids = torch.zeros(total, width + length, dtype=torch.long)
    ids[:, :width][prompt_mask] = torch.tensor([i for row in rows for i in row["prompt_ids"]], dtype=torch.long)
    ids[:, width:][seen] = torch.tensor([i for row in rows for i in row["ids"]], dtype=torch.long)

    def values(*names: str) -> Tensor:
        """[B, T] of the first of some fields that a line has."""
        found = torch.zeros(total, length)
        for row, line in enumerate(rows):
            written: Sequence[Any] = next((line[name] for name in names if name in line), [])
            found[row, : len(written)] = _tensor(written)
        return found.to(device)

    steps = torch.full((total, length), torch.nan)
    for row, line in enumerate(rows):
        for token, score in line["steps"]:
            steps[row, token] = value_of(score)
    firsts = rows[::size]
    prompts = Prompts(
        tuple(row["prompt"] for row in firsts),
        {name: tuple(row["columns"][name] for row in firsts) for name in sorted(firsts[0]["columns"])},
    )
    sampled = Sampled(
        ids=ids.to(device),
        attention_mask=torch.cat([prompt_mask, seen], 1).to(device),
        mask=mask.to(device),
        logprobs=values("old_logprobs"),
        entropy=values("entropy"),
        texts=tuple(row["completion"] for row in rows),
        finished=tuple(row["finished"] for row in rows),
        support=_kept(rows, length, device),
        turns=_texts(rows, "turns"),
        replies=_texts(rows, "replies"),
    )
    scored = Scored(
        prompts=prompts,
        sampled=sampled,
        rewards={name: _tensor([row["rewards"][name] for row in rows]) for name in (*header["rewards"], "total")},
        right=torch.tensor([row["right"] for row in rows]),
        scores=torch.stack([_tensor(row["scores"]) for row in rows]),
        steps=steps,
    )
    return Restored(header, scored, values("ref_logprobs"), values("logprobs", "old_logprobs"))


def number(value: float) -> float | str | None:
    """A float32 as JSON has it: nine digits, which tell it from every other; null for NaN, "inf" and "-inf"."""
    if math.isnan(value):
        return None
    return float(f"{value:.9g}") if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def value_of(written: float | str | None) -> float:
    """What `number` wrote."""
    return math.nan if written is None else float(written)


def _tensor(written: Sequence[float | str | None]) -> Tensor:
    return torch.tensor([value_of(one) for one in written], dtype=torch.float32)


def _texts(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[str, ...], ...] | None:
    """[B] what was said in episodes; None of completions of one turn."""
    return tuple(tuple(row[name]) for row in rows) if all(name in row for row in rows) else None


def _kept(rows: Sequence[Mapping[str, Any]], length: int, device: torch.device) -> SamplingSupport | None:
    """[B, T] the sets that tokens were drawn from; None where all were drawn from the whole vocabulary."""
    sets = [row.get("kept") or [] for row in rows]
    if not any(sets):
        return None
    sizes = torch.tensor([[len(one) for one in own] + [0] * (length - len(own)) for own in sets], dtype=torch.int32)
    ids = torch.tensor([token for own in sets for one in own for token in one], dtype=torch.int32)
    return SamplingSupport(sizes, ids).to(device)


def _hidden(value: Any) -> Any:
    """A prompt or a column without secrets."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _hidden(one) for key, one in value.items()}
    return [_hidden(one) for one in value] if isinstance(value, list | tuple) else value


def _columns(prompts: Prompts) -> tuple[list[dict[str, Any]], list[str]]:
    """[P] the columns of each prompt that JSON can hold, and the names of the others."""
    kept: list[dict[str, Any]] = [{} for _ in prompts.texts]
    left_out = []
    for name, values in prompts.columns.items():
        hidden = [_hidden(value) for value in values]
        try:
            same = json.loads(json.dumps(hidden, allow_nan=False)) == hidden
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:  # an object, a date, a mapping whose keys are numbers
            left_out.append(name)
            continue
        for row, value in zip(kept, hidden, strict=True):
            row[name] = value
    return kept, left_out
