"""`python -m kvjax.serving.cli`: the same as `kvjax`."""

from kvjax.serving.cli.app import main

if __name__ == "__main__":
    main()
