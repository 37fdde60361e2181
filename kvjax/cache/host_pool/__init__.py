"""Pages of the pool that lie in host memory, and are read in place or brought."""
