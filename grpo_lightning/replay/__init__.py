"""Recorded rollouts without a model: what other rewards, advantages and losses would have made of them.

``python -m grpo_lightning.replay DIR [overrides…]``
"""
