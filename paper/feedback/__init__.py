"""One grid of feedbacks and compressors: accuracy, rounds and total bytes of each, on two data sets."""
