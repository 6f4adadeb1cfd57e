"""Tests, and what they share, in ``support``."""
