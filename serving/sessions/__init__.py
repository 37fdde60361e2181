"""Sessions: histories of token ids that stay in the cache, in process (`SessionRuntime`) and over gRPC (`kvjax
serve`)."""
