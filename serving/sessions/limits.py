"""Limits on what clients can make a server hold or do, where the server is not told otherwise. A module of its own, which `--help` can read
without JAX."""

MAX_POLICIES = 8
"""Distinct policies of forms with '*' that sessions may bring in while a runtime lives."""
MAX_HISTORY = 2**22
"""Tokens of one session's history."""
MAX_STOP_TOKENS = 1024
"""Stop tokens of one call."""
MAX_WAITING = 1024
"""Calls that may wait for one session's generation."""
MAX_NAME = 200
"""Characters of a policy's name that are looked at."""
