"""Ops that exchange small arrays between the devices of a mesh."""
