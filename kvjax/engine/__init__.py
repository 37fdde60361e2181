"""The engine: pages, steps and the sequences in them."""
