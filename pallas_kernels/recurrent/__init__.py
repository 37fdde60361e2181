"""Ops of layers that keep a state in place of keys."""
