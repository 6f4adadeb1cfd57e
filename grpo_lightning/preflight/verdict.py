"""What the measurements of a preflight mean, in sentences, and its page for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping
from typing import Any

FEW = 0.2
"""Share of teaching groups below which learning is slow, as in docs/metrics.md."""
CUT = 0.1
"""Share of truncated completions above which the limit is too low, as in docs/metrics.md."""


def verdict(facts: Mapping[str, Any]) -> list[str]:
    """What to think of what `look.look` has measured, and what to change, most important first."""
    return [*_on_groups(facts), *_on_scores(facts), f"{facts['run']['steps']} steps would take about {_run(facts)}."]


def _on_groups(facts: Mapping[str, Any]) -> Iterator[str]:
    size, right = facts["group_size"], facts["right"]
    own = facts["groups"][str(size)]
    yield (
        f"{own['teaching']:.0%} of the groups of {size} teach: their rewards differ; {right:.0%} of completions are "
        "right."
    )
    if right == 0:
        yield (
            f"No completion is right by {facts['outcome']}: easier prompts, supervised fine-tuning first "
            "(module=sft), or look at what the reward expects."
        )
    elif own["teaching"] < FEW:
        remedy = "harder prompts" if right > 0.5 else "easier prompts"
        yield f"Few groups teach: {remedy}, a larger rollout.group_size or a higher rollout.temperature."
    elif own["mixed"] < FEW and own["mixed"] < own["teaching"] / 2:
        yield (
            f"Only {own['mixed']:.0%} of the groups differ in {facts['outcome']}: the other rewards are what most "
            "groups teach; watch that the outcome rises with the total."
        )
    pays = facts["pays"]
    if pays is None or pays == size:
        return
    other = facts["groups"][str(pays)]
    if pays < size:
        yield (
            f"rollout.group_size={pays} would do: {other['teaching']:.0%} of its groups teach, and a step takes "
            f"{other['seconds']:.2g} s instead of {own['seconds']:.2g} s."
        )
    else:
        yield (
            f"rollout.group_size={pays} pays: {other['teaching']:.0%} of its groups would teach, and "
            f"{other['teaching_per_second']:.1f} completions per second instead of {own['teaching_per_second']:.1f}."
        )


def _on_scores(facts: Mapping[str, Any]) -> Iterator[str]:
    lengths = facts["completions"]
    if lengths["truncated"] > CUT:
        turns = lengths.get("max_turns")
        more = "" if turns is None else f", or environment.max_turns={turns} if episodes have no end in so many turns"
        yield (
            f"Completions are cut in {lengths['truncated']:.0%} of cases: raise rollout.max_new_tokens="
            f"{lengths['max_new_tokens']}{more}."
        )
    for name, reward in facts["rewards"].items():
        if reward["failed"]:
            yield f"reward {name} failed on {reward['failed']:.1%} of completions: raise its timeout, or mend it."
        if reward["none"] > (CUT if name != "total" else 0):
            yield f"reward {name} says nothing (None) of {reward['none']:.1%} of completions."
        if name != "total" and reward["std"] == 0:
            yield f"reward {name} is {reward['mean']:g} for all completions: it teaches nothing."


def page(facts: Mapping[str, Any]) -> list[str]:
    """The measurements of `look.look` as lines of at most 80 characters, without the verdict."""
    completions, run, step = facts["completions"], facts["run"], facts["step"]
    lines = [f"preflight: {facts['prompts']} prompts x {facts['group_size']} completions", ""]
    for name, reward in facts["rewards"].items():
        failed = "" if reward["failed"] is None else f", failed {reward['failed']:.1%}"
        lines.append(f"reward/{name}"[:40] + f": None {reward['none']:.1%}{failed}")
        if reward["mean"] is not None:
            lines.append("              mean {mean:.3g} ± {std:.3g}, from {min:.3g} to {max:.3g}".format(**reward))
    lines += [
        "",
        f"completions   mean {completions['length_mean']:.1f}, 95 % within {completions['length_p95']:.0f}, longest "
        f"{completions['length_max']:.0f} of {completions['max_new_tokens']} tokens",
        f"              {completions['truncated']:.1%} cut at rollout.max_new_tokens"
        + (" or environment.max_turns" if completions.get("max_turns") else ""),
        "",
        "group size     teach   outcome differs    s/step    teaching completions/s",
    ]
    for size, group in facts["groups"].items():
        notes = [note for note, key in (("now", "group_size"), ("pays", "pays")) if facts[key] == int(size)]
        lines.append(
            f"{size:>10} {group['teaching']:>9.0%} {group['mixed']:>17.0%} {group['seconds']:>9.2f} "
            f"{group['teaching_per_second']:>14.1f}   {', '.join(notes)}".rstrip()
        )
    phases = ", ".join(f"{name} {step[name]:.3g} s" for name in ("rollout", "reward", "score", "update"))
    memory = ", ".join(f"{value:.2f} GiB {kind}" for kind, value in facts["memory_gib"].items())
    return [
        *lines,
        "Sizes above the sampled one: rates of prompts taken to be beta distributed.",
        "",
        f"a step        {step['total']:.3g} s: {phases}",
        f"memory        {memory}",
        f"the run       {run['steps']} steps and {run['validations']} validations: about {_run(facts)}",
    ]


def _run(facts: Mapping[str, Any]) -> str:
    """How long the run takes, in the unit that people would choose."""
    seconds = facts["run"]["seconds"]
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
