"""Tests, and what they share, in ``support``."""

from grpo_lightning.distributed.alone import leave_checkout

leave_checkout()  # a folder in it may be called as a package that libraries look for
