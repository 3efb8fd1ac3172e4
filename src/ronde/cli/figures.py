"""Numbers as people read them. Used by the tables of `ronde top` and `ronde doctor`."""

from __future__ import annotations

__all__ = []
