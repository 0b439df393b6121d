"""What every room uses: arrays, keys, layouts, payloads, options, files and errors."""
