"""``python -m grpo_lightning.report``."""

from pathlib import Path

from grpo_lightning import start
from grpo_lightning.distributed import fresh
from grpo_lightning.report.command import main

if __name__ == "__main__":
    start.START = Path.cwd().resolve()
    start.pass_by_settings()
    fresh.protect_processes()
    main()
