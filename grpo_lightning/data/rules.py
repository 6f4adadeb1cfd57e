"""What each number of the data may be."""

from grpo_lightning.allowed import integer

RULES = {
    "prompts_per_step": integer(1),
    "tries": integer(1),
    "steps": integer(0),
    "validate_every": integer(0, null=True),
    "validation_size": integer(1),
    "validation_batch_size": integer(1),
    "max_prompt_length": integer(1, null=True),
    "num_workers": integer(0),
}
"""Number of `PromptData` -> what it may be."""
