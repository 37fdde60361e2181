"""Code that the decode kernels for Mosaic GPU share."""
