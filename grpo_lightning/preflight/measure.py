"""Rollouts and updates that are only looked at: no optimizer step is made, and weights stay as they are."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import cast

import torch

from grpo_lightning.clock import Clock, peak_memory
from grpo_lightning.data import PromptData
from grpo_lightning.data.order import prompt_index
from grpo_lightning.distributed.ranks import SINGLE_PROCESS
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.module.selfcheck import check_rollout
from grpo_lightning.module.update import accumulate
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.collector import Collected
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.sampler.vllm.engine import WeightSource
from grpo_lightning.schedule import resolve_schedules
from grpo_lightning.types import Prompts, Rollout, Scored

_PHASES = ("rollout", "reward", "score")
_OF_SAMPLING = ("wake", "sync", "environment")
"""Phases of a step that are counted as sampling: what engines and environments take."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What some rollouts of one process's prompts were like, and what they and an update of one of them took."""

    scored: Scored
    """All completions, whatever group filter or down-sampling the run has."""
    failed: dict[str, float]
    """Reward with a timeout -> fraction of the completions on which it failed."""
    prompts: int
    """Prompts of each rollout."""
    max_new_tokens: int
    """The most tokens of a completion."""
    phases: dict[str, float]
    """Median seconds of "rollout", "reward", "score" (the reference) and "update" of one rollout."""
    small_group: tuple[int, float] | None
    """A smaller group size and the seconds to collect a rollout of it; None where there is none."""
    memory: int
    """Most bytes in use: allocated on a GPU, resident on a CPU; without the optimizer's own."""


def measure(module: GRPOLightningModule, data: PromptData, *, prompts: int, processes: int) -> Measured:
    """Sample, score and compare the next training prompts, and make the backward passes of an update of some.

    Of the processes, which divide a step's prompts, it measures one; at least ``prompts`` are asked, as many as fill
    rollouts, and at most those that there are. Arguments as in `look.look`.

    Raises:
        RuntimeError: The first rollout contradicts itself, see ``module.selfcheck``, or the update does not fit.
    """
    step = module.completed_steps
    own = resolve_schedules(module.rollout, step)
    collector = replace(own, group_filter=None, max_tries=1, downsample=None)
    size = min(-(-data.prompts_per_step // processes), prompts)
    batches = list(_batches(data, step, size=size, number=max(1, min(-(-prompts // size), len(data.train) // size))))
    if on_gpu := module.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(module.device)
    collected, seconds = [], []
    for number, batch in enumerate(batches):
        one, phases = _collect(module, collector, batch, step + number)
        collected.append(one)
        seconds.append(phases)
        if module.self_check and number == 0:
            checked = (module.policy, module.reference, one.rollout, own.sampling, module.microbatch_tokens)
            check_rollout(*checked, coarse=module.sampler.is_coarse, filtered=module.sampler.is_engine)
    try:
        # the first one also tries which ways of computing the model allows
        update = [_update(module, _trained(own, one), own.temperature, processes) for one in collected[-2:]][-1]
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            "the update does not fit into the GPU's memory: a smaller module.microbatch_tokens, "
            "policy.gradient_checkpointing=true, policy.adapter or trainer=fsdp need less"
        ) from error
    small, small_group = max(2, own.group_size // 4), None
    if small < own.group_size:
        _, phases = _collect(module, replace(collector, group_size=small), batches[-1], step + len(batches) - 1)
        small_group = (small, sum(phases.values()))
    return Measured(
        scored=Scored.concatenate([one.scored for one in collected]),
        failed={
            name.removeprefix("failure/"): sum(float(one.metrics[name]) for one in collected) / len(collected)
            for name in collected[0].metrics
            if name.startswith("failure/")
        },
        prompts=size,
        max_new_tokens=own.max_new_tokens,
        phases={phase: median(one[phase] for one in seconds) for phase in _PHASES} | {"update": update},
        small_group=small_group,
        memory=torch.cuda.max_memory_allocated(module.device) if on_gpu else peak_memory(),
    )


def _batches(data: PromptData, step: int, *, size: int, number: int) -> Iterator[Prompts]:
    """The run's next prompts, in its order."""
    source, first = data.train, step * data.prompts_per_batch
    for start in range(first, first + size * number, size):
        yield Prompts.collate([source[prompt_index(data.seed, i, len(source))] for i in range(start, start + size)])


def _collect(
    module: GRPOLightningModule, collector: Collector, prompts: Prompts, step: int
) -> tuple[Collected, dict[str, float]]:
    clock = Clock()
    clock.restart()
    context = StepContext(seed=module.seed_of("preflight", step), clock=clock)
    policy = cast(WeightSource, module.policy)
    with module.sampler.ready(policy, version=module.completed_steps, clock=clock, ranks=SINGLE_PROCESS):
        collected = collector.collect(
            module.policy, module.reference, prompts, microbatch_tokens=module.microbatch_tokens, context=context
        )
    seconds = clock.read()
    found = {phase: seconds.get(phase, 0.0) for phase in _PHASES}
    found["rollout"] += sum(seconds.get(phase, 0.0) for phase in _OF_SAMPLING)
    return collected, found


def _trained(collector: Collector, collected: Collected) -> Rollout:
    """The rows that an update would be made of: those that down-sampling keeps."""
    if collector.downsample is None:
        return collected.rollout
    rewards = collected.scored.rewards["total"].view(len(collected.scored.prompts), -1)
    inside = collector.downsample(rewards)
    return collected.rollout[(torch.arange(len(rewards)).unsqueeze(-1) * rewards.shape[-1] + inside).flatten()]


def _update(module: GRPOLightningModule, rollout: Rollout, temperature: float, processes: int) -> float:
    """Seconds of all backward passes over a rollout; the gradients are dropped."""
    loss = resolve_schedules(module.loss, module.completed_steps)
    size = max(1, (module.minibatch_size or len(rollout) * processes) // processes)
    parameters = list(module.policy.parameters())
    before = [parameter.grad for parameter in parameters]
    started = time.perf_counter()
    try:
        for minibatch in rollout.minibatches(size=size, epochs=1, generator=torch.Generator().manual_seed(0)):
            for parameter in parameters:
                parameter.grad = None
            update = accumulate(
                module.policy,
                loss,
                minibatch,
                temperature=temperature,
                microbatch_tokens=module.microbatch_tokens,
                skip_dead=module.skip_dead,
                on_policy_step=module.ppo_epochs == 1 and size >= len(rollout),
                is_first=True,
                ranks=SINGLE_PROCESS,
                backward=lambda value, last: value.backward(),  # noqa: ARG005
            )
            float(update.ratio.sum())  # waits for a GPU
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return module.ppo_epochs * (time.perf_counter() - started)
