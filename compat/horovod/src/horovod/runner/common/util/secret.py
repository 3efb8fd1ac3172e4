"""The secret key of a service."""

from __future__ import annotations

import secrets

KEY_BYTES = 32


def make_secret_key() -> bytes:
    """Return a new random key. Whoever has it may use the service."""
    return secrets.token_bytes(KEY_BYTES)
