"""NIID-Bench's table of four algorithms on label-skewed images, made again with the public API."""
