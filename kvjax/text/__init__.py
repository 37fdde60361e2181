"""Texts and token ids."""
