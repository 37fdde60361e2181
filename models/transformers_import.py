"""transformers, imported for its tokenizers alone."""

from __future__ import annotations

import logging
from types import ModuleType

ADVICE = "PyTorch was not found"


def import_transformers() -> ModuleType:
    """The package, without the line by which its first import advises to install PyTorch: kvjax has no use for that.

    Only that line is kept back. The user's log levels and environment stay as they are.
    """
    logger = logging.getLogger("transformers")
    logger.addFilter(_is_no_advice)
    try:
        import transformers
    finally:
        logger.removeFilter(_is_no_advice)
    return transformers


def _is_no_advice(record: logging.LogRecord) -> bool:
    return ADVICE not in record.getMessage()
