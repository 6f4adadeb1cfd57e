"""Rollouts as files: one for each recorded step, one line for each completion."""
