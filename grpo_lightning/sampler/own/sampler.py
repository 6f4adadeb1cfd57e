"""The native sampler: the policy's own forward passes, with the weights that are trained."""

from collections.abc import Sequence
from typing import Any

from grpo_lightning.sampler.base import OnFinished, Partner, Poll, Sampler
from grpo_lightning.sampler.own.decode import decode
from grpo_lightning.sampler.own.draw import uniforms
from grpo_lightning.sampler.text import Conversation, StopStrings, as_sampled, reporter
from grpo_lightning.types import Prompt, Sampled, Sampling


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
        partner: Partner | None = None,
    ) -> Sampled:
        tokens = policy.tokenize(prompts)
        longest = max(map(len, tokens)) + sampling.max_new_tokens
        policy.check_context(longest, "rollout.max_new_tokens")
        cache = policy.cache(tokens, group_size, longest=longest)
        rows = [(first_prompt + prompt, member) for prompt in range(len(tokens)) for member in range(group_size)]
        talk = None if partner is None else Conversation(partner, policy.tokenizer, policy.reply_ids)
        with policy.evaluation():
            decoded = decode(
                cache,
                uniforms(seed, rows, sampling.max_new_tokens).to(policy.device),
                sampling=sampling,
                end_ids=policy.end_ids,
                pad_id=policy.pad_id,
                stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
                poll=poll,
                on_finished=reporter(policy.tokenizer, on_finished),
                at_once=policy.at_once(tokens, sampling, longest=longest),
                talk=talk,
            )
        return as_sampled(policy, tokens, decoded, talk)
