"""The CFedAvg paper, reproduced with the public API: experiments, studies of theory, claims and results."""
