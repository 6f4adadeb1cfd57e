"""Train, validate or export a policy: ``python train.py algorithm=dapo rollout.group_size=8 seed=1``."""

from grpo_lightning.composition import main

if __name__ == "__main__":  # worker processes of rewards import this file, too, and start nothing
    main()
