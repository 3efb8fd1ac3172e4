"""A rank of tests/jobs/test_keras.py: runs all checks on the backend of KERAS_BACKEND, up to the first that fails, and
writes how they ended to a file: `keras_checks.py <folder> [<check> ...]`."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import ronde
from tests.jobs.keras_checks import async_training, batch_norm, callbacks, elastic, mixed_precision, saving, training

MODULES = (training, async_training, mixed_precision, saving, callbacks, batch_norm, elastic)


def main() -> None:
    """Tell of each check how it ended."""
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    ronde.init()
    path = folder / f"rank{ronde.rank()}.json"
    results: dict[str, dict[str, Any]] = {}
    for module in MODULES:
        for name, check in vars(module).items():
            if not name.startswith("check_") or (wanted and name not in wanted):
                continue
            began = time.monotonic()
            try:
                check()
            except BaseException:
                results[name] = {"failed": traceback.format_exc()[-4000:]}
                path.write_text(json.dumps(results))
                raise SystemExit(1) from None
            results[name] = {"took_s": time.monotonic() - began}
    path.write_text(json.dumps(results))
    ronde.shutdown()


if __name__ == "__main__":
    main()
