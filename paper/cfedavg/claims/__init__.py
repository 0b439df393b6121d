"""What the paper claims, held against archived cells: verdicts come from numbers."""
