"""`python mixed_ranks.py COMMAND …` runs the command with operations of graphs as native kernels on rank 0, and through
Python on the other ranks."""

from __future__ import annotations

import os
import sys

if os.environ["RONDE_RANK"] != "0":
    os.environ["RONDE_TENSORFLOW_OPS"] = "python"
os.execvp(sys.argv[1], sys.argv[1:])
