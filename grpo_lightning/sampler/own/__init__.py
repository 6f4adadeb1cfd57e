"""The sampler of this project: the policy itself, one token of every completion at a time."""
