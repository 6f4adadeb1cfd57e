"""Several processes: which portion of the work each does, Lightning's strategies for them, sharded weights."""
