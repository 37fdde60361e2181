"""Optional packages: `pip install kvjax` installs only what loading, generating and batch jobs need.

A function that needs more calls `needs_extras` first, and then imports the packages inside itself. No module imports an
extra's package when it is itself imported.
"""

from __future__ import annotations

import importlib.util

EXTRAS = {
    "eval": ("pandas", "tabulate", "matplotlib"),
    "plots": ("matplotlib",),
    "ray": ("ray", "pyarrow"),
    "server": ("grpc", "grpc_health", "grpc_reflection", "google", "prometheus_client", "starlette", "uvicorn"),
}
"""The packages of each extra of pyproject.toml that the library imports."""


class MissingExtra(ImportError):
    """A package of an extra of kvjax is not installed."""


def needs_extras(what: str, *extras: str) -> None:
    """Raise MissingExtra if a package of these extras is not installed. The message names the packages and the command
    that installs them.

    Args:
        what: what needs them, as the message begins: "kvjax evaluate".
        extras: names in `EXTRAS`.
    """
    missing = {extra: [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None] for extra in extras}
    if packages := [name for names in missing.values() for name in names]:
        install = ",".join(extra for extra, names in missing.items() if names)
        raise MissingExtra(f"{what} needs {' and '.join(packages)}, not installed here: pip install 'kvjax[{install}]'")
