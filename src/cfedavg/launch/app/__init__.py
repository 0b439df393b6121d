"""A Flower app that trains what a Config names, as `cfedavg run` does, with a node for each client."""
