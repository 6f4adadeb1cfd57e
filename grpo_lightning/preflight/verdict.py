"""What the measurements of a preflight mean, in sentences, and its page for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping
from typing import Any

FEW = 0.2
"""Share of teaching groups below which learning is slow, as in docs/metrics.md."""
CUT = 0.1
"""Share of truncated completions above which the limit is too low, as in docs/metrics.md."""
_WIDTH = 40
"""Characters of the longest bar."""


def verdict(facts: Mapping[str, Any]) -> list[str]:
    """What to think of it and what to change, most important first; the first sentence is on the groups that teach.

    Args:
        facts: What `look.look` has measured.
    """
    return [*_on_groups(facts), *_on_completions(facts), *_on_rewards(facts), *_on_cost(facts)]


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
    more = other["teaching_per_second"] / own["teaching_per_second"] - 1 if own["teaching_per_second"] else None
    if pays < size:
        yield (
            f"rollout.group_size={pays} would do: {other['teaching']:.0%} of its groups teach, and a step takes "
            f"{other['seconds']:.2g} s instead of {own['seconds']:.2g} s."
        )
    else:
        gain = "" if more is None else f", and {more:.0%} more completions per second do"
        yield f"rollout.group_size={pays} pays: {other['teaching']:.0%} of its groups would teach{gain}."


def _on_completions(facts: Mapping[str, Any]) -> Iterator[str]:
    lengths = facts["completions"]
    if lengths["truncated"] > CUT:
        turns = lengths.get("max_turns")
        more = "" if turns is None else f", or environment.max_turns={turns} if episodes have no end in so many turns"
        yield (
            f"Completions are cut in {lengths['truncated']:.0%} of cases: raise rollout.max_new_tokens="
            f"{lengths['max_new_tokens']}{more}."
        )


def _on_rewards(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, reward in facts["rewards"].items():
        if reward["failed"]:
            failed = f"{reward['failed']:.1%} of completions"
            yield f"reward {name} failed on {failed}: raise its timeout, or mend it."
        if reward["none"] > (CUT if name != "total" else 0):
            yield f"reward {name} says nothing (None) of {reward['none']:.1%} of completions."
        if name != "total" and reward["std"] == 0:
            yield f"reward {name} is {reward['mean']:g} for all completions: it teaches nothing."


def _on_cost(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts["update_fits"]:
        yield (
            "The update does not fit into the GPU's memory: a smaller module.microbatch_tokens, "
            "policy.gradient_checkpointing=true, policy.adapter or trainer=fsdp need less."
        )
    run = facts["run"]
    yield (
        f"{run['steps']} steps would take about {duration(run['seconds'])}."
        if run["seconds"] is not None
        else ("How long the run takes is not known.")
    )


def page(facts: Mapping[str, Any]) -> list[str]:
    """The measurements as lines of at most 80 characters, without the verdict.

    Args:
        facts: What `look.look` has measured.
    """
    completions, run, step = facts["completions"], facts["run"], facts["step"]
    lines = [f"preflight: {facts['prompts']} prompts x {facts['group_size']} completions"]
    for name, reward in facts["rewards"].items():
        lines += ["", *_reward(name, reward)]
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
        notes = [
            note
            for note, is_so in (("now", int(size) == facts["group_size"]), ("pays", int(size) == facts["pays"]))
            if is_so
        ]
        lines.append(
            f"{size:>10} {group['teaching']:>9.0%} {group['mixed']:>17.0%} {group['seconds']:>9.2f} "
            f"{group['teaching_per_second']:>14.1f}   {', '.join(notes)}".rstrip()
        )
    lines.append("Sizes above the sampled one: rates of prompts taken to be beta distributed.")
    phases = ", ".join(f"{name} {_seconds(step[name])}" for name in ("rollout", "reward", "score", "update"))
    lines += ["", f"a step        {_seconds(step['total'])}: {phases}"]
    memory = ", ".join(f"{value:.2f} GiB {kind}" for kind, value in facts["memory_gib"].items())
    lines += [f"memory        {memory}"]
    lines += [
        f"the run       {run['steps']} steps and {run['validations']} validations: about {duration(run['seconds'])}"
    ]
    return lines


def _reward(name: str, reward: Mapping[str, Any]) -> Iterator[str]:
    mean = "-" if reward["mean"] is None else f"{reward['mean']:.3g} ± {reward['std']:.3g}"
    failed = "" if reward["failed"] is None else f", failed {reward['failed']:.1%}"
    yield f"reward/{name}"[:40].ljust(14) + f" mean {mean}, None {reward['none']:.1%}{failed}"
    largest = max((bar["share"] for bar in reward["histogram"]), default=1.0)
    for bar in reward["histogram"]:
        label = f"{bar['low']:.3g}" + (f" to {bar['high']:.3g}" if bar["high"] != bar["low"] else "")
        yield f"{label:>20}  {'#' * round(_WIDTH * bar['share'] / largest):<{_WIDTH}} {bar['share']:>6.1%}"


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.3g} s"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that people would choose."""
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
