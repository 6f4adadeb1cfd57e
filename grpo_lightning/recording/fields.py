"""What the lines of a recorded rollout hold, and whether they do. Nothing heavy is imported.

Numbers come from anywhere: sizes are counted before memory is taken for them.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

FORMAT = "grpo-lightning rollout 1"
"""What the first line of a file calls itself; the number changes with the meaning of a field."""

_MOST_ROWS = 1 << 20
_MOST_POSITIONS = 1 << 28
_LARGEST_ID = 1 << 31


def header_problem(first: Any) -> str | None:
    """What is wrong with the first line of a file; None if nothing is."""
    if not isinstance(first, dict) or first.get("format") != FORMAT:
        told = first.get("format") if isinstance(first, dict) else None
        return f"its first line has format={told!r:.60}, and not {FORMAT!r}"
    for key, least in _COUNTS.items():
        if not _is_count(first.get(key), least):
            return f"{key}={first.get(key)!r:.60}; allowed is an integer >= {least}"
    for key, is_right in _OTHERS.items():
        if not is_right(first.get(key)):
            return f"{key}={first.get(key)!r:.60} is not what belongs there"
    count = first["prompts"] * first["group_size"]
    if count > _MOST_ROWS or count * (first["prompt_tokens"] + first["completion_tokens"]) > _MOST_POSITIONS:
        return f"it tells of {count} completions of {first['completion_tokens']} tokens, more than a rollout has"
    if len(first["weights"]) != len(first["rewards"]):
        return f"it has {len(first['weights'])} weights of {len(first['rewards'])} rewards"
    numbers = [row for own in first["microbatches"] or () for batch in own for row in batch]
    if numbers and max(numbers) >= count:
        return f"its micro-batches name row {max(numbers)} of {count}"
    return None


def row_problem(row: Any, first: Mapping[str, Any]) -> str | None:
    """What does not fit in the line of a completion; None if all does."""
    if not isinstance(row, dict):
        return "no object"
    for key, limit in (("prompt_ids", "prompt_tokens"), ("ids", "completion_tokens")):
        ids = row.get(key)
        if not isinstance(ids, list) or len(ids) > first[limit] or not all(_is_count(i, 0, _LARGEST_ID) for i in ids):
            return f"{key} are not at most {limit}={first[limit]} token ids"
    length = len(row["ids"])
    for key in ("old_logprobs", "entropy", "ref_logprobs", "logprobs"):
        values = row.get(key)
        if (
            values is None
            and key in ("ref_logprobs", "logprobs")
            and not (key == "ref_logprobs" and first["reference"])
        ):
            continue
        if not isinstance(values, list) or len(values) != length or not all(map(_is_number, values)):
            return f"{key} are not {length} numbers"
    if "kept" in row and not _are_sets(row["kept"], row["ids"]):
        return f"kept are not {length} sets of tokens that each increase and have its token of ids"
    if problem := _turns_problem(row, length):
        return problem
    names = first["rewards"]
    rewards, scores = row.get("rewards"), row.get("scores")
    if (
        not isinstance(rewards, dict)
        or rewards.keys() != {*names, "total"}
        or not all(map(_is_number, rewards.values()))
    ):
        return f"rewards are not numbers for {', '.join(names)} and total"
    if not isinstance(scores, list) or len(scores) != len(names) or not all(map(_is_number, scores)):
        return f"scores are not {len(names)} numbers"
    marks = row.get("steps")
    if not isinstance(marks, list) or not all(
        isinstance(m, list) and len(m) == 2 and _is_count(m[0], 0, length) and _is_number(m[1]) for m in marks
    ):
        return "steps are not pairs of a token's number and a score"
    if not isinstance(row.get("completion"), str) or not isinstance(row.get("columns"), dict):
        return "completion and columns are not a text and an object"
    if not isinstance(row.get("right"), bool) or not isinstance(row.get("finished"), bool):
        return "right and finished are not true or false"
    if not _is_prompt(row.get("prompt")):
        return "prompt is neither text nor messages nor token ids"
    return None


def _turns_problem(row: Mapping[str, Any], length: int) -> str | None:
    """What is wrong with the turns of an episode; None if nothing is, and of a completion of one turn."""
    turns, replies, spans = row.get("turns"), row.get("replies"), row.get("spans")
    if turns is replies is spans is None:
        return None
    if not isinstance(turns, list) or not all(isinstance(text, str) for text in turns):
        return "turns are no texts"
    if not isinstance(replies, list) or not all(isinstance(text, str) for text in replies):
        return "replies are no texts"
    if not isinstance(spans, list) or len(spans) != len(turns) or len(turns) != len(replies) + 1:
        return "turns, replies and spans are not as many as belong together"
    places = [0]
    for span in spans:
        if not isinstance(span, list) or len(span) != 2 or not all(_is_count(place, 0, length + 1) for place in span):
            return "spans are not pairs of a first token and an end"
        places += span
    if places[1] != 0 or places[-1] != length or any(first >= end for first, end in pairwise(places[1:])):
        return f"spans do not lie one behind another from 0 to {length}"
    return None


def _are_sets(value: Any, ids: list[int]) -> bool:
    """Whether there is a set for each token that has it, or an empty one for the whole vocabulary."""
    return (
        isinstance(value, list)
        and len(value) == len(ids)
        and all(isinstance(one, list) and all(_is_count(i, 0, _LARGEST_ID) for i in one) for one in value)
        and all(not one or (token in one and one == sorted(set(one))) for one, token in zip(value, ids, strict=True))
    )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list):
        return False
    if all(_is_count(one, 0, _LARGEST_ID) for one in value):
        return True
    return all(isinstance(one, dict) and all(isinstance(text, str) for text in one.values()) for one in value)


def _is_count(value: Any, least: int, below: int = 1 << 62) -> bool:
    return type(value) is int and least <= value < below


def _is_number(value: Any) -> bool:
    """Whether a value stands for a float: a number; null for NaN; or "inf" or "-inf"."""
    return value is None or type(value) in (int, float) or value in ("inf", "-inf")


def _are_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(one is None or type(one) in (int, float) for one in value.values())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _are_weights(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) in (int, float) for one in value)


def _are_microbatches(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(isinstance(own, list) for own in value)
        and all(
            isinstance(b, list) and b and all(_is_count(row, 0, _MOST_ROWS) for row in b) for own in value for b in own
        )
    )


_COUNTS = {
    **{"step": 1, "prompts": 1, "group_size": 2, "prompt_tokens": 0, "completion_tokens": 0},
    **{"num_tokens": 0, "optimizer_steps": 1},
}
_OTHERS: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: type(value) in (int, float) and value > 0,
    "rewards": _are_names,
    "weights": _are_weights,
    "fresh": lambda value: isinstance(value, bool),
    "complete": lambda value: isinstance(value, bool),
    "reference": lambda value: isinstance(value, bool),
    "policy": lambda value: isinstance(value, str),
    "collected": _are_metrics,
    "updated": _are_metrics,
    "settings": lambda value: isinstance(value, dict),
    "microbatches": _are_microbatches,
}
