"""Code that the kernels for Mosaic GPU (Hopper and newer) share: lanes and their helpers, clusters, tiles of decoding and of queries."""
