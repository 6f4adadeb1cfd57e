"""Lightning callbacks: checkpoints, health checks, logs, iterative GRPO. A run can do without each of them.

Two of them change results, and are off unless chosen: `reference` moves the reference of the KL term, `reward_model`
trains the reward model that scores the completions.
"""
