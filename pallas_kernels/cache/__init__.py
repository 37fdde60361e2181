"""Ops that write, pack, copy and place what a cache holds."""
