"""What is computed inside a transformers model: attention over shared prompts, the LM head, log-probabilities."""
