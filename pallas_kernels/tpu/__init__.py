"""Code that the Pallas Mosaic TPU kernels share."""
