"""Train, validate or export a policy: ``python train.py algorithm=dapo rollout.group_size=8 seed=1``."""

import sys

if __name__ == "__main__":  # worker processes of rewards import this file, too, and start nothing
    del sys.path[: not sys.flags.safe_path]  # this directory: whatever lies here would be found before Python's own
    sys.path.insert(0, __file__.rpartition("train.py")[0] + "grpo_lightning/distributed/alone")
    import grpo_lightning_alone  # noqa: F401, I001
    from grpo_lightning.composition import main

    main()
