"""SLURM: a job that is about to be ended goes back into the queue."""

import logging
import os
import re
import subprocess

log = logging.getLogger(__name__)

_LONGEST = 60.0  # s for SLURM's controller to answer


def requeue() -> None:
    """Have SLURM run this process's job again, by ``scontrol requeue``; where that cannot be, a warning says why."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        log.warning("requeue=true: not requeued, since this is no job of SLURM's (SLURM_JOB_ID=%s)", job or "not set")
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=_LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("requeue=true: job %s is not requeued: %s", job, error)
        return
    if done.returncode:
        log.warning("requeue=true: job %s is not requeued, scontrol says: %s", job, done.stderr.strip())
    else:
        log.warning("job %s is requeued", job)
