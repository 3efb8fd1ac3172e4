"""How much is logged, as HOROVOD_LOG_LEVEL and horovodrun's --log-level say. Used by hvd.init() and horovodrun."""

from __future__ import annotations

import logging
import sys

__all__ = ["LEVELS", "set_level"]

LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
LOGGERS = ("horovod", "ronde")


def set_level(text: str, *, hide_time: bool = False) -> None:
    """Log from this level on. Levels below WARNING are printed on standard error; a script's own logging
    is left alone."""
    if text.upper() not in LEVELS:
        raise ValueError(f"HOROVOD_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {text!r}")
    level = LEVELS[text.upper()]
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if level < logging.WARNING and not logger.hasHandlers():
            handler = logging.StreamHandler(sys.stderr)
            time = "" if hide_time else "%(asctime)s "
            handler.setFormatter(logging.Formatter(f"{time}%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False
