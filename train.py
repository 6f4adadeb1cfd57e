"""Train, validate or export a policy: ``python train.py algorithm=dapo rollout.group_size=8 seed=1``."""

if __name__ == "__main__":  # worker processes of rewards import this file, too, and start nothing
    from grpo_lightning.cli import main

    main()
