"""Both systems on the same completions: log-probabilities, loss and gradients."""

import tempfile
from pathlib import Path

import torch

from benchmarks import ours, theirs
from benchmarks.setting import NATIVE, Setting
from grpo_lightning.types import Rollout, Sampling

TOLERANCE = 1e-4
SETTING = Setting("equality", prompt=24, cap=40, mean=20, group=6, prompts=3, hidden=64, layers=2, kl=0.04)


def run() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        SETTING.write(Path(directory))
        module, trainer = ours.built(SETTING, directory), theirs.built(SETTING, directory)
    policy, model = module.policy, trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():  # the reference differs from the policy, or the KL term would be 0
        for p, q in zip(policy.parameters(), model.parameters(), strict=True):
            step = 0.02 * torch.randn_like(p)
            p.add_(step)
            q.add_(step)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=SETTING.cap)
    texts = [text for text, _ in SETTING.texts(SETTING.prompts)]
    sampled = NATIVE.generate(policy, texts, group_size=SETTING.group, sampling=sampling, seed=0)
    length = sampled.mask.shape[1]
    scores = torch.rand(SETTING.prompts, SETTING.group, generator=torch.Generator().manual_seed(0))
    advantages = module.rollout.advantage(scores).flatten()
    reference = module.reference.logprobs(sampled, temperature=1.0)
    rows = Rollout(
        sampled.ids,
        sampled.attention_mask,
        sampled.mask,
        sampled.logprobs,
        reference,
        advantages[:, None] * sampled.mask,
    )
    weights = module.loss.weights(rows.mask)
    logprobs, _ = policy.logprobs_and_entropy(
        rows, temperature=1.0, loss_gradient=module.loss.gradient(rows, weights, on_policy=False)
    )
    value, _ = module.loss(logprobs, None, rows, weights)
    value.backward()

    start = rows.ids.shape[1] - length
    given = {
        "prompt_ids": rows.ids[:, :start],
        "prompt_mask": rows.attention_mask[:, :start].long(),
        "completion_ids": rows.ids[:, start:],
        "completion_mask": rows.mask.long(),
        "advantages": advantages,
        "old_per_token_logps": sampled.logprobs,
        "num_items_in_batch": rows.mask.sum(),
    }
    with torch.no_grad():
        inputs = torch.cat([given["prompt_ids"], given["completion_ids"]], 1), rows.attention_mask.long()
        given["ref_per_token_logps"], _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.ref_model, *inputs, length
        )
        scored, _, _ = trainer._get_per_token_logps_and_entropies(model, *inputs, length)
    loss = trainer._compute_loss(model, given)
    loss.backward()
    gradient, other = (
        torch.cat([p.grad.flatten() for p in parameters]) for parameters in (policy.parameters(), model.parameters())
    )
    gaps = {
        "log-probabilities": float((logprobs.detach() - scored)[rows.mask].abs().max() / scored[rows.mask].abs().max()),
        "reference": float((reference - given["ref_per_token_logps"])[rows.mask].abs().max()),
        "loss": float((value - loss).detach().abs() / loss.detach().abs()),
        "gradient": float((gradient - other).norm() / other.norm()),
    }
    print("equality: " + ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items()), flush=True)
    if not max(gaps.values()) < TOLERANCE:
        raise SystemExit(f"the two differ by more than {TOLERANCE}")
    return gaps
