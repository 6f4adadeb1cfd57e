"""What corrects the loss where another distribution than the policy drew the tokens: an engine, another dtype.

An engine that samples from the policy's weights computes other probabilities than training does, mu in place of pi_old.
An expectation under pi_old is one under mu in which everything counts rho = pi_old / mu times as much; bounds keep the
variance of rho small, at the price of some bias. The factor multiplies the weights of the loss, without gradient.

Each correction takes (log_ratio, mask), both [B, T], and settings by keyword, and returns the factor [B, T] >= 0.
log_ratio = log pi_old - log mu of the sampled tokens. Weights are not normalized anew: factors
below 1 on average make the step smaller.
"""

from grpo_lightning.correction.factor import (
    geometric_mask,
    none,
    sequence_mask,
    sequence_truncation,
    token_mask,
    token_truncation,
)

__all__ = ["geometric_mask", "none", "sequence_mask", "sequence_truncation", "token_mask", "token_truncation"]
