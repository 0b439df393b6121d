"""A federation simulated in one process or several: runs, engines, checkpoints."""
