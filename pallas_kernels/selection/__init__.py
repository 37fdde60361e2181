"""Ops that score keys, blocks or tiles, and choose which of them are read."""
