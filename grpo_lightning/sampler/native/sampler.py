"""Sampling: tokens from a causal language model, with the log-probability of each as it was drawn.

Shapes: N completions in all, T tokens of the longest; b of them are drawn at a time, n of which have just ended.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.sampler.base import Decoded, OnFinished, OnRowsFinished, Poll, Responder, Sampler
from grpo_lightning.sampler.native.decode_batch import DecodeBatch
from grpo_lightning.sampler.native.kv_cache import KVCache
from grpo_lightning.sampler.native.multi_turn import MultiTurnBatch
from grpo_lightning.sampler.native.token_sampling import uniforms
from grpo_lightning.sampler.text import Conversation, StopStrings, as_sampled, reporter
from grpo_lightning.types import Prompt, Sampled, Sampling

COMPACT_BELOW = 0.75
"""Ended completions are dropped once at most this fraction of those held is still running and none waits.

Dropping copies the keys and values of all that remain, so it is not done for each one that ends.
"""
COMPACT_BELOW_GPU = 0.5
"""The same on a GPU, where every size has to be recorded."""
SYNC_EVERY = 16
"""Tokens between two looks at the results where looking means waiting for a GPU."""
WARM_UP = 1
"""Steps that are made before one is recorded, so that what is compiled is compiled and libraries have chosen their
kernels."""


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
    on_finished: OnRowsFinished | None = None,
    max_concurrent: int | None = None,
    sync_every: int | None = None,
    talk: Conversation | None = None,
) -> Decoded:
    """Draw the completions of a cache.

    What is drawn depends on nothing but the weights and the random numbers: not on which completions are held at a
    time, nor on when it is looked at the results.

    Args:
        cache: The model, with its prompts.
        uniforms: [N, max_new_tokens] the random numbers that decide the tokens.
        sampling: How tokens are drawn.
        end_ids: The token ids that end a completion; the first of them still belongs to it.
        pad_id: The token id that fills ended completions.
        stops: Which completions end for another reason; None: no other reason.
        poll: Called before every look; what it raises is passed on.
        on_finished: Called with the completions that have just ended.
        max_concurrent: The most completions that are held at a time, others waiting for one of them to end; None: all.
        sync_every: Tokens between two looks; None: 1 on a CPU, else `SYNC_EVERY`.
        talk: Replies to completions that have ended a turn, which then go on; None: they are over.

    Raises:
        FloatingPointError: The logits are not finite.
    """
    on_cpu = uniforms.device.type == "cpu"
    sync_every = sync_every or (1 if on_cpu else SYNC_EVERY)
    cache.rewinds = talk is not None
    # A completion draws once when it takes its slot, which may be between two looks.
    kind = MultiTurnBatch if talk else DecodeBatch
    slots = kind(cache, uniforms, sampling=sampling, end_ids=end_ids, draws=sync_every + 1)
    # What each holds grows by itself where it does not refill: then those that have ended must not go on.
    compact = 1.0 if talk and not cache.refills else COMPACT_BELOW if on_cpu else COMPACT_BELOW_GPU
    replay = CUDAGraphStep(slots.step, uniforms.device if cache.is_static else torch.device("cpu"))
    waiting = list(range(len(uniforms)))[::-1]  # the next one last
    max_concurrent = min(max_concurrent or len(waiting), len(waiting))
    slots.open([waiting.pop() for _ in range(max_concurrent)])
    while True:
        over = slots.look(stops)
        if talk and isinstance(slots, MultiTurnBatch):
            over += slots.answer(talk, can_wait=bool(waiting and cache.refills and slots.free))
        if on_finished and (told := [row for row in over if slots.finished[row]]):
            on_finished(told, *slots.drawn(told))
        taken = slots.taken
        if not (taken or waiting):
            break
        if poll:
            poll()
        if waiting and (free := slots.free) and (cache.refills or not taken):
            size = min(len(free) if cache.refills else max_concurrent, len(waiting))
            rows = [waiting.pop() for _ in range(size)]
            if cache.refills:
                slots.fill(free[:size], rows)
            else:
                slots.open(rows)
            continue  # some may be over with their first token
        if len(taken) < len(slots.held) and len(taken) <= compact * len(slots.held):
            slots.keep(taken)
        least = min((slots.lengths[slots.held[slot] or 0] for slot in slots.running), default=0)
        tokens = min(sync_every, sampling.max_new_tokens - least)
        cache.reserve(tokens)
        replay(tokens, cache.version)
    ids, seen = slots.drawn(range(len(uniforms)))
    length = seen.shape[1]
    replied = slots.replied(length)
    mask = seen if replied is None else seen & ~replied
    return Decoded(
        ids=ids.where(seen, pad_id),
        mask=mask,
        seen=seen,
        logprobs=slots.logprobs[:, :length].where(mask, 0.0),
        entropies=slots.entropies[:, :length].where(mask, 0.0),
        finished=torch.tensor(slots.finished, device=uniforms.device),
        support=slots.support(),
    )


class CUDAGraphStep:
    """Repeats a step that reads and writes the same tensors every time.

    A step on a GPU is a thousand small kernels; queueing them takes the CPU longer than the GPU needs for them. A
    recording is queued as a whole: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

    Args:
        step: What is repeated.
        device: Where its tensors are; it is recorded on "cuda" only.
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
            self._version, self._graph = version, None  # the old recording's memory is free for the new one
        if self._graph is None:
            times = self._warmed_up(times)
        if times and self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Recording computes nothing.
            with torch.cuda.graph(self._graph):
                self._step()
        for _ in range(times):
            if self._graph is not None:
                self._graph.replay()

    def _warmed_up(self, times: int) -> int:
        """Make the first steps one by one; returns how many are left."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        first = min(WARM_UP, times)
        with torch.cuda.stream(stream):
            for _ in range(first):
                self._step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return times - first


class NativeSampler(Sampler):
    """Generates with the policy itself: no weights are copied, nothing is rounded."""

    def generate(
        self,
        policy: Any,
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
        cache = policy.kv_cache(tokens, group_size, longest=longest)
        rows = [(first_prompt + prompt, member) for prompt in range(len(tokens)) for member in range(group_size)]
        talk = None if responder is None else Conversation(responder, policy.tokenizer, policy.reply_ids)
        with policy.eval_mode():
            decoded = decode(
                cache,
                uniforms(seed, rows, sampling.max_new_tokens).to(policy.device),
                sampling=sampling,
                end_ids=policy.end_ids,
                pad_id=policy.pad_id,
                stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
                poll=poll,
                on_finished=reporter(policy.tokenizer, on_finished),
                max_concurrent=policy.max_concurrent(tokens, sampling, longest=longest),
                talk=talk,
            )
        return as_sampled(policy, tokens, decoded, talk)
