"""GRPO post-training of language models as a PyTorch Lightning module, composed by Hydra."""

__version__ = "0.1.0"
