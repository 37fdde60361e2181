"""Imports transformers, for its tokenizers and configuration classes."""

from __future__ import annotations

import logging
from types import ModuleType

ADVICE = "PyTorch was not found"


def import_transformers() -> ModuleType:
    """The package. Its first import prints advice to install PyTorch, which kvjax does not need. Only that line is
    suppressed.

    The user's log levels and environment do not change.
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
