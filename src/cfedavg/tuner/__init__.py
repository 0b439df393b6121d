"""The tuner: it chooses compressors, local work and rates for a budget, by successive halving.

    tuned = cfedavg.tune(config, task, budget="10MB", minutes=5, out="runs/tune")
    result = cfedavg.run(tuned.config, task)

`space` draws the candidates, `holdout` the samples on which they are compared. `probe` measures what the
default costs, and `plan` fits clients, candidates and rungs to the stated time. `race` trains the candidates
of a rung, `rung` decides for which of them there is time, `refine` tries neighbours of the best, and `search`
goes from one to the next. `record` holds what a resumed search needs, `result` what is found; `tuner` is the
function `tune`.
"""
