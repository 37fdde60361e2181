"""Code that the kernels for Mosaic GPU (Hopper and newer) share: for single threads, for decode and for prefill."""
