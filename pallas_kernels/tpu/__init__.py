"""What the Pallas Mosaic TPU kernels share."""
