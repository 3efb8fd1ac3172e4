"""Starting jobs: `horovodrun` (launch) and horovod.run()."""

from __future__ import annotations

from horovod.runner.function import run

__all__ = ["run"]
