"""The rounds to 54% of McMahan et al. (2017) on Shakespeare, made again with the public API; then the bytes."""
