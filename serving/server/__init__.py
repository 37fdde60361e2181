"""The gRPC and HTTP servers of `kvjax serve`."""
