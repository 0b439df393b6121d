"""A stack of clients that train at once: their step, its operators, who steps when, and on which samples."""
