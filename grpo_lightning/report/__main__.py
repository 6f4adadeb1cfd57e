"""``python -m grpo_lightning.report``."""

from grpo_lightning.report.command import main

if __name__ == "__main__":
    main()
