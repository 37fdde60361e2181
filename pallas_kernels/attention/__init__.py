"""Ops that attend to paged keys and values."""
