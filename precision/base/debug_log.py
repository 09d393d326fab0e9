"""The level of Halfsafe's log: ``HALFSAFE_LOG=debug`` shows what was decided for each layer."""

import logging
import os

LOG_VARIABLE = "HALFSAFE_LOG"


def set_log_level() -> str | None:
    """Log at the level that ``HALFSAFE_LOG`` asks for. Returns what is wrong with its value; None if it is right or
    not set."""
    level = os.environ.get(LOG_VARIABLE, "").upper()
    if not level:
        return None
    if not isinstance(logging.getLevelName(level), int):
        return f"{LOG_VARIABLE}={level} is not a Python logging level: set it to debug, info, warning or error."
    logging.getLogger("halfsafe").setLevel(level)
    return None
