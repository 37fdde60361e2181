"""What `kvjax bench` measures: steps of decoding, prefill, one layer of it, its ops."""
