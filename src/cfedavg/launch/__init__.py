"""A whole federation on this machine: credentials, processes, and the app they run."""
