"""Batch normalization over the batches of all processes, on CPUs too."""

from __future__ import annotations

from ronde.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
