"""Rounds to 54% on Shakespeare (McMahan et al., 2017), made again with the public API; then bytes to 54%."""
