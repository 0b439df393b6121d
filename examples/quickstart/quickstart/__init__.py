"""A Flower app as one writes it: PyTorch, FedAvg, and nothing of CFedAvg but the data."""
