"""Blocks of pages off the device: in host memory, on disk, in files."""
