"""Data sets that are read in one order by any number of ranks, their preparation, and their transfer."""

from __future__ import annotations

from ronde.data.dataset import open_dataset
from ronde.data.stream import Stream

__all__ = ["Stream", "open_dataset"]
