"""What `kvjax bench` measures: decode steps, and the time to first token."""
