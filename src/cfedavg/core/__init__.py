"""What all other packages use: arrays, keys, layouts, payloads, options, files and errors."""
