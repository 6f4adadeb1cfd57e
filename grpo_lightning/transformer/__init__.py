"""What is computed inside a transformers model: attention over shared prompts, the head, log-probabilities, sizes."""
