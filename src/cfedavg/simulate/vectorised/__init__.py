"""Training of many clients at once: their batches, their common step, and replaced torch functions."""
