"""The stages in their order, with what each may take and what it has to show."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    name: str
    """Of its module here and of its file of results."""
    seconds: int
    """After which it is ended."""
    passes: str
    """What has to hold."""
    package: str = "benchmarks.gpu"
    """Of its module."""


STAGES = (
    Stage("machine", 20, "-"),
    Stage("equality", 90, "float32 1e-4, bf16 on average .01; prompts stay shared"),
    Stage("flex", 50, "relative error in bf16 < 1e-2; no recompilation after warming up"),
    Stage("synchronisation", 40, "none in 16 tokens; ids by graph and without are equal"),
    Stage("decode", 110, "at least .4 of the memory's limit at 256 rows or fewer"),
    Stage("mismatch", 80, "on average less than .01 nats"),
    Stage("head", 50, "at most 1.5 times its three products"),
    Stage("step", 60, "measured memory within 10 % of the prediction"),
    Stage("learning", 90, "pass@1 above .8 after 40 steps; the run continues"),
)
NAMES = tuple(stage.name for stage in STAGES)
REDUCED_SECONDS = 120
"""Of every stage at reduced size, where other things may run beside it."""
