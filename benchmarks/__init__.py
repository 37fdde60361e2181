"""What the documents of the project show: one script per subject, `python -m benchmarks.NAME`, and its results as
JSON."""
