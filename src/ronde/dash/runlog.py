"""The log of a training run: every rank measures itself, rank 0 writes. For training loops; see ronde.dash.

Costs: add() is one short line into a file, step() two looks at the clock, gather() one small allgather.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

import ronde
from ronde.dash.meter import Meter, RankShare, this_process
from ronde.dash.records import Begun, Ended, Record, Sampled, Values, encode, read_log

__all__ = ["RunLog"]


class RunLog:
    """All ranks make one, at the same time; rank 0 has the file.

    `step` is how many steps are done already: above 0 the log of the run so far goes on, otherwise it begins anew.
    `gpu` tells the load of this rank's GPU in percent, for example `torch.cuda.utilization`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        facts: Mapping[str, object] | None = None,
        step: int = 0,
        gpu: Callable[[], float] | None = None,
        exchange: Callable[[Any], list[Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        """The file; only rank 0 writes it."""
        self._rank = ronde.rank() if ronde.is_initialized() else 0
        self._exchange = exchange or _allgather
        """Gives everybody everybody's value, in the order of ranks; tests pass their own."""
        self._clock = clock
        self._file: BinaryIO | None = None
        every = self._exchange((platform.node(), self._open(step) if self._rank == 0 else 0.0))
        hosts = tuple(host for host, _ in every)
        before_s: float = every[0][1]
        self._began_s: float = clock() - before_s
        self._write(Begun(step=step, at_s=before_s, facts=_facts(facts or {}, len(hosts)), hosts=hosts))
        self._meter = Meter(self._rank, clock=clock, load=this_process(gpu))

    def step(self) -> AbstractContextManager[None]:
        """`with log.step():` around one step of training, without the loading of its data.

        Costs two looks at the clock, and one at the load of the processor once a second.
        """
        return self._meter.step()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Rank 0's numbers after so many steps; on other ranks nothing happens.

        Names are like `train/loss`: the report draws all that end in `/loss` in one plot, one line per beginning.
        """
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self._write(Values(step=step, at_s=self._now_s(), values=finite))

    def gather(self, step: int) -> tuple[RankShare, ...]:
        """What every rank did since the last time, by rank; rank 0 writes it down. All ranks must call it at the same
        step: once per epoch, or every so many steps. Call it before validation, which is no part of training."""
        shares = tuple(self._exchange(self._meter.take(self._began_s)))
        self._write(Sampled(step=step, at_s=self._now_s(), ranks=shares))
        return shares

    def close(self) -> None:
        """The run is over. Idempotent."""
        if self._file is not None:
            self._write(Ended(at_s=self._now_s()))
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLog:
        """Close it at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; after an error without saying that the run came to its end."""
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step: int) -> float:
        """Open the file; how many seconds the run has had so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0 or not self.path.exists():
            self._file = self.path.open("wb")
            return 0.0
        data = self.path.read_bytes()
        run = read_log(self.path)
        self._file = self.path.open("ab")
        if data and not data.endswith(b"\n"):  # torn: end it, so that it spoils no other line
            self._file.write(b"\n")
        done_s = [value.at_s for value in run.values if value.step <= step]
        done_s += [sample.at_s for sample in run.samples if sample.step <= step]
        return max(done_s, default=0.0)

    def _write(self, record: Record) -> None:
        if self._file is not None:
            self._file.write(encode(record))
            self._file.flush()  # what a killed run did is of interest

    def _now_s(self) -> float:
        return self._clock() - self._began_s


def _allgather(value: Any) -> list[Any]:  # any value
    return ronde.objects.allgather(value) if ronde.is_initialized() else [value]


def _facts(given: Mapping[str, object], num_ranks: int) -> dict[str, str]:
    facts = {
        "ranks": num_ranks,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        **given,
        "ronde": ronde.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {name: str(value) for name, value in facts.items()}
