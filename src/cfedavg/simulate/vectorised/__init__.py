"""Clients that train at once: their common step, its operators, and who steps when on which samples."""
