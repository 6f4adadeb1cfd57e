"""Checkpoints: reading and writing them, adapters, continuing a run, and cutting its event files back."""
