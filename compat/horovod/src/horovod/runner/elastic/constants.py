"""Texts that are looked for in errors."""

RESET_LIMIT_EXCEEDED_MESSAGE = (
    "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"  # Horovod's own words
)
