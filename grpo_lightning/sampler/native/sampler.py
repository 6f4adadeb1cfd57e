"""The native sampler: the policy's own forward passes, with the weights that are trained.

Shapes: N completions in all, T tokens of the longest.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning.sampler.base import Completions, OnFinished, Poll, Responder, Sampler
from grpo_lightning.sampler.native.decode_batch import DecodeBatch
from grpo_lightning.sampler.native.kv_cache import KVCache
from grpo_lightning.sampler.native.multi_turn import MultiTurnBatch
from grpo_lightning.sampler.native.token_sampling import uniforms
from grpo_lightning.sampler.text import Conversation, OnIdsFinished, StopStrings, as_sampled, report_texts
from grpo_lightning.types import Prompt, Sampled, Sampling

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

COMPACT_BELOW = 0.75
"""Completions that are over are dropped once at most this fraction of those held is still running and none waits.

Dropping copies the keys and values of all that remain, so it is not done for each one that ends.
"""
COMPACT_BELOW_GPU = 0.5
"""The same on a GPU, where every size has to be recorded."""
SYNC_EVERY = 16
"""Tokens between two looks at the results where looking means waiting for a GPU."""


class NativeSampler(Sampler):
    """Generates with the policy itself: no weights are copied, nothing is rounded."""

    def generate(
        self,
        policy: "Policy",
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_prompt: int = 0,
        poll: Poll | None = None,
        on_finished: OnFinished | None = None,
        responder: Responder | None = None,
    ) -> Sampled:
        tokens = policy.tokenize(prompts)
        longest = max(map(len, tokens)) + sampling.max_new_tokens
        policy.check_context(longest, "rollout.max_new_tokens")
        rows = [(first_prompt + prompt, member) for prompt in range(len(tokens)) for member in range(group_size)]
        conversation = None if responder is None else Conversation(responder, policy)
        cache = policy.kv_cache(tokens, group_size, longest=longest)
        with policy.eval_mode():
            completions = decode(
                cache,
                uniforms(seed, rows, sampling.max_new_tokens).to(policy.device),
                sampling=sampling,
                end_ids=policy.end_ids,
                pad_id=policy.pad_id,
                stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
                poll=poll,
                on_finished=report_texts(policy.tokenizer, on_finished),
                max_concurrent=policy.max_concurrent(tokens, sampling, longest=longest),
                conversation=conversation,
            )
        return as_sampled(policy, tokens, completions, conversation)


@torch.no_grad()
def decode(
    cache: KVCache,
    uniforms: Tensor,
    *,
    sampling: Sampling,
    end_ids: Sequence[int],
    pad_id: int,
    stops: StopStrings | None = None,
    poll: Poll | None = None,
    on_finished: OnIdsFinished | None = None,
    max_concurrent: int | None = None,
    sync_every: int | None = None,
    conversation: Conversation | None = None,
) -> Completions:
    """Decode the completions of a cache, token by token.

    A completion depends on nothing but the weights and the random numbers: not on which others are decoded beside it,
    nor on how often results are looked at.

    Args:
        cache: The model, with its prompts.
        uniforms: [N, max_new_tokens] the random numbers that decide the tokens.
        sampling: How tokens are sampled.
        end_ids: The token ids that end a completion; the first of them still belongs to it.
        pad_id: The token id that fills ended completions.
        stops: Which completions end for another reason; None: no other reason.
        poll: Called before every look at the results; what it raises is passed on.
        on_finished: Called with the completions that have just ended by themselves.
        max_concurrent: The most completions at a time, others waiting for one of them to end; None: all.
        sync_every: Tokens between two looks at the results; None: 1 on a CPU, else `SYNC_EVERY`.
        conversation: Replies to completions that have ended a turn, which then go on; None: they are over.

    Raises:
        FloatingPointError: The logits are not finite.
    """
    on_cpu = uniforms.device.type == "cpu"
    sync_every = sync_every or (1 if on_cpu else SYNC_EVERY)
    cache.rewinds = conversation is not None
    kind = MultiTurnBatch if conversation else DecodeBatch
    # A completion samples once when it takes its slot, which may be between two looks.
    batch = kind(cache, uniforms, sampling=sampling, end_ids=end_ids, steps=sync_every + 1)
    # A cache that does not refill grows by itself: then completions that are over must not go on.
    compact = 1.0 if conversation and not cache.refills else COMPACT_BELOW if on_cpu else COMPACT_BELOW_GPU
    step = CUDAGraphStep(batch.step, uniforms.device if cache.is_static else torch.device("cpu"))
    waiting = list(range(len(uniforms)))[::-1]  # the next one last
    max_concurrent = min(max_concurrent or len(waiting), len(waiting))
    batch.open([waiting.pop() for _ in range(max_concurrent)])
    while True:
        over = batch.sync(stops)
        if conversation and isinstance(batch, MultiTurnBatch):
            over += batch.converse(conversation, can_wait=bool(waiting and cache.refills and batch.free))
        if on_finished and (ended := [row for row in over if batch.finished[row]]):
            on_finished(ended, batch.token_ids(ended))
        taken = batch.taken
        if not (taken or waiting):
            return batch.completions(pad_id)
        if poll:
            poll()
        if waiting and (free := batch.free) and (cache.refills or not taken):
            size = min(len(free) if cache.refills else max_concurrent, len(waiting))
            rows = [waiting.pop() for _ in range(size)]
            if cache.refills:
                batch.fill(free[:size], rows)
            else:
                batch.open(rows)
            continue  # some may be over with their first token
        if len(taken) < len(batch.rows) and len(taken) <= compact * len(batch.rows):
            batch.keep(taken)
        shortest = min((batch.lengths[batch.rows[slot]] for slot in batch.running), default=0)
        tokens = min(sync_every, sampling.max_new_tokens - shortest)
        cache.reserve(tokens)
        step(tokens, cache.version)


class CUDAGraphStep:
    """Repeats a step that reads and writes the same tensors every time, on a GPU as a CUDA graph.

    A step on a GPU is a thousand small kernels; queueing them takes the CPU longer than the GPU needs for them. A
    graph is queued as a whole: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

    Args:
        step: What is repeated.
        device: Where its tensors are; a graph is recorded on "cuda" only.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step, self._device = step, device
        self._version: int | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int, version: int) -> None:
        """Make the step ``times`` times; ``version`` is another one when it would use other tensors or shapes."""
        if self._device.type != "cuda":
            for _ in range(times):
                self._step()
            return
        if version != self._version:
            self._version, self._graph = version, None  # the old graph's memory is free for the new one
        if self._graph is None and times:
            self._warm_up()
            times -= 1
        if self._graph is None and times:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # which computes nothing
                self._step()
        for _ in range(times):
            if self._graph is not None:
                self._graph.replay()

    def _warm_up(self) -> None:
        """Make a step before one is recorded, in which functions are compiled and libraries choose their kernels."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
