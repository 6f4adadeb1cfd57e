"""How rewards are called, checked, weighted and run in worker processes."""
