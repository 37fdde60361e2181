"""Code for single threads of a Mosaic GPU kernel."""
