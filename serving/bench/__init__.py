"""What `kvjax bench` measures: decode steps, prefill and its attention, requests through the scheduler, the host's time, compilation."""
