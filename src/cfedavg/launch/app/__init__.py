"""An app for Flower that trains what a Config names, as `cfedavg run` would: here each node is a client."""
