"""Code that the prefill kernels for Mosaic GPU share."""
