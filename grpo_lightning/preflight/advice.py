"""Advice from the facts of a preflight, and its page for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping
from typing import Any

LOW_SIGNAL = 0.2
"""Share of groups with signal below which learning is slow, as in docs/metrics.md."""
HIGH_TRUNCATION = 0.1
"""Share of truncated completions above which the limit is too low, as in docs/metrics.md."""


def advice(facts: Mapping[str, Any]) -> Iterator[str]:
    """What to think of the facts of a preflight and what to change, most important first."""
    size, right, pays, lengths = (facts[name] for name in ("group_size", "right", "pays", "completions"))
    current = facts["groups"][str(size)]
    yield f"{current['signal']:.0%} of the groups of {size} have signal (their rewards differ); {right:.0%} are right."
    if right == 0:
        yield (
            f"No completion is right by {facts['outcome']}: easier prompts, supervised fine-tuning first "
            "(module=sft), or look at what the reward expects."
        )
    elif current["signal"] < LOW_SIGNAL:
        remedy = "harder prompts" if right > 0.5 else "easier prompts"
        yield f"Few groups have signal: {remedy}, a larger rollout.group_size or a higher rollout.temperature."
    elif current["mixed"] < min(LOW_SIGNAL, current["signal"] / 2):
        yield (
            f"Only {current['mixed']:.0%} of the groups differ in {facts['outcome']}: most signal comes from the other "
            "rewards; watch that the outcome rises with the total."
        )
    if pays not in (None, size):
        other = facts["groups"][str(pays)]
        yield (
            f"rollout.group_size={pays} pays: {other['signal']:.0%} of its groups have signal, a step takes "
            f"{other['seconds']:.2g} s instead of {current['seconds']:.2g} s."
        )
    if lengths["truncated"] > HIGH_TRUNCATION:
        turns = lengths.get("max_turns")
        more = "" if turns is None else f", or environment.max_turns={turns} if episodes have no end in so many turns"
        yield (
            f"{lengths['truncated']:.0%} of completions are truncated: raise rollout.max_new_tokens="
            f"{lengths['max_new_tokens']}{more}."
        )
    for name, reward in facts["rewards"].items():
        if reward["failed"]:
            yield f"reward {name} failed on {reward['failed']:.1%} of completions: raise its timeout, or fix it."
        if reward["none"] > (HIGH_TRUNCATION if name != "total" else 0):
            yield f"reward {name} is None for {reward['none']:.1%} of completions."
        if name != "total" and reward["std"] == 0:
            yield f"reward {name} is {reward['mean']:g} for all completions: it has no signal."
    yield f"{facts['run']['steps']} steps would take about {_duration(facts['run']['seconds'])}."


def page(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts of a preflight as lines of at most 80 characters."""
    completions, run, step = facts["completions"], facts["run"], facts["step"]
    yield f"preflight: {facts['prompts']} prompts x {facts['group_size']} completions"
    for name, reward in facts["rewards"].items():
        failed = "" if reward["failed"] is None else f", failed {reward['failed']:.1%}"
        yield f"reward/{name}"[:40] + f": None {reward['none']:.1%}{failed}"
        if reward["mean"] is not None:
            yield "              mean {mean:.3g} ± {std:.3g}, from {min:.3g} to {max:.3g}".format(**reward)
    yield (
        f"completions   mean {completions['length_mean']:.1f}, 95 % within {completions['length_p95']:.0f}, longest "
        f"{completions['length_max']:.0f} of {completions['max_new_tokens']} tokens"
    )
    turns = " or environment.max_turns" if completions.get("max_turns") else ""
    yield f"              {completions['truncated']:.1%} truncated at rollout.max_new_tokens{turns}"
    yield ""
    yield "group size    signal   outcome differs    s/step"
    for size, group in facts["groups"].items():
        notes = [note for note, key in (("now", "group_size"), ("pays", "pays")) if facts[key] == int(size)]
        columns = f"{size:>10} {group['signal']:>9.0%} {group['mixed']:>17.0%} {group['seconds']:>9.2f}"
        yield f"{columns}   {', '.join(notes)}".rstrip()
    yield "Sizes above the sampled one: prompts' rates are taken to be beta distributed."
    yield ""
    phases = ", ".join(f"{name} {step[name]:.3g} s" for name in ("rollout", "reward", "score", "update"))
    yield f"a step        {step['total']:.3g} s: {phases}"
    yield "memory        " + ", ".join(f"{value:.2f} GiB {kind}" for kind, value in facts["memory_gib"].items())
    duration = _duration(run["seconds"])
    yield f"the run       {run['steps']} steps and {run['validations']} validations: about {duration}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
