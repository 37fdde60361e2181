"""`python -m kvjax`: the same as the command `kvjax`."""

import importlib

if __name__ == "__main__":
    # By name, as the front door does it: this layer imports none above it.
    importlib.import_module("kvjax.serving.cli").run_and_leave()
