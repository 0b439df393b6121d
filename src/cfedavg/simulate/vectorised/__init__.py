"""Many clients that train at once: their common step, the functions it replaces, and their batches."""
