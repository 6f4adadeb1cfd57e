"""The native sampler: the policy's own forward passes, with the weights that are trained."""
