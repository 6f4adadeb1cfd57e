"""Figures of this project, and beside them those of others."""
