"""Horovod's interface on top of ronde: `import horovod.torch as hvd` and `horovodrun` work as they did.

This package renames; the work is ronde's. Migration guide: docs/horovod.md in ronde's repository.
"""

from __future__ import annotations

from horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1+ronde.0.1.0"
"""The interface is that of Horovod 0.28.1; what comes after the plus is ours."""
