"""Requests: when each is read and decoded, and in which batch."""
