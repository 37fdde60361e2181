"""Batch jobs: records in, answers out, resumable."""
