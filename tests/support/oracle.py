"""Sampling as it is explained: one completion after another, every token from a forward pass over all before it."""

import torch

from grpo_lightning.sampler.token_sampling import sample_tokens, uniforms
from grpo_lightning.types import Sampling


@torch.no_grad()
def sampled_alone(policy, prompts, *, group_size: int, sampling: Sampling, seed: int):
    """For each completion its ids, log-probabilities and entropies, and the sets that the tokens were drawn from."""
    found = []
    for number, prompt in enumerate(policy.tokenize(prompts)):
        for member in range(group_size):
            numbers = uniforms(seed, [(number, member)], sampling.max_new_tokens)[0]
            ids, logprobs, entropies, sets = [], [], [], []
            for uniform in numbers:
                logits = policy.model(torch.tensor([prompt + ids]), use_cache=False).logits[:, -1]
                token, logprob, entropy, _, kept = sample_tokens(logits, sampling, uniform[None])
                ids.append(int(token))
                logprobs.append(float(logprob))
                entropies.append(float(entropy))
                sets.append([] if kept is None else kept[kept >= 0].tolist())
                if ids[-1] in policy.end_ids or any(
                    text in policy.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for text in sampling.stop
                ):
                    break
            found.append((ids, logprobs, entropies, sets))
    return found
