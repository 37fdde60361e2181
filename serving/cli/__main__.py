"""`python -m kvjax.serving.cli`: the same as `kvjax`."""

from kvjax.serving.cli import run_and_leave

if __name__ == "__main__":
    run_and_leave()
