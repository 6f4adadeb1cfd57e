"""Train, validate or export a policy: ``python train.py algorithm=dapo rollout.group_size=8 seed=1``."""

import sys

if __name__ == "__main__":  # worker processes of rewards import this file, too, and start nothing
    if not sys.flags.safe_path:
        sys.path[0] += "/grpo_lightning/distributed/alone"  # else whatever lies here is found before Python's own
        import grpo_lightning_alone  # noqa: F401
    from grpo_lightning.composition import main

    main()
