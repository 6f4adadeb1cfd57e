"""A directory for the path of jobs that launchers start: Python runs ``sitecustomize`` there before anything else."""
