"""Whatever a run can do without: callbacks that read what the steps return.

Two of them change results, and are off unless chosen: `reference` moves the reference of the KL term, `reward_model`
trains the reward model that scores the completions.
"""
