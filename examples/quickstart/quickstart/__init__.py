"""Digits with Flower and PyTorch. Two lines in each app make all messages small: see compress.diff."""
