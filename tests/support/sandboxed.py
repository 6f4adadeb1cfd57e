"""What workers of rewards run in tests of the sandbox: imports little."""

from grpo_lightning.reward.code import code
from grpo_lightning.sandbox import client

SETTINGS = {"all_or_nothing": False, "seconds": 5.0, "cpu_seconds": 2, "seconds_in_all": 20.0, "memory_mb": 256}


def without_landlock(completions, tests):
    """The reward on a kernel without Landlock."""
    begin = client._BEGIN
    change = "from grpo_lightning.sandbox import landlock; landlock._CREATE = 5000; "
    try:
        client._BEGIN = begin.replace("main(int", f"{change}main(int")
        return code(completions, tests, **SETTINGS)
    finally:
        client._BEGIN = begin
