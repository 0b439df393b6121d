"""The CFedAvg paper, made again on the public API: experiments, studies of the theory, claims, results."""
