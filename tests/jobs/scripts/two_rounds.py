"""What each rank of tests/jobs/test_other_launchers.py does: joins by itself, twice, and reports what it found.

Needs nothing but ronde, so that it runs in every environment: `python two_rounds.py FOLDER` writes FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import ronde


def main() -> None:
    """Two rounds: the second has to find its way while the first is still being put away."""
    sums = []
    for _ in range(2):
        ronde.init(start_s=60.0, operation_s=60.0)
        rank, size = ronde.rank(), ronde.size()
        sums.append(float(ronde.allreduce(np.full(3, rank + 1.0))[0]))
        local = (ronde.local_rank(), ronde.local_size())
        ronde.shutdown()
    found = {"rank": rank, "size": size, "local": local, "sums": sums}
    Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
