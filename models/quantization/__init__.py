"""Checkpoints with packed weights: what config.json says of them, how they are read, and how they are written."""
