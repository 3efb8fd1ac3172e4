"""Data sets that are read in one order by any number of ranks, their preparation, and their transfer."""

from __future__ import annotations

from ronde.data.dataset import open_dataset
from ronde.data.preparation import PrepareOptions, choose_split, prepare
from ronde.data.samples import decode_image
from ronde.data.stream import Stream

__all__ = ["PrepareOptions", "Stream", "choose_split", "decode_image", "open_dataset", "prepare"]
