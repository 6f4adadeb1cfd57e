"""How rewards are called, checked, gated, weighted and run in worker processes."""
