"""Layers that train faster on a CPU than torch's own, for any model."""
