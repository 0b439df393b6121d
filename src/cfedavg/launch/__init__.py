"""A Flower federation on one machine: its credentials, its processes, and the Flower app that they run."""
