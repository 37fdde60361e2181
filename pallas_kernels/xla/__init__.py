"""Code that the implementations for every backend share."""
