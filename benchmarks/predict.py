"""How much faster `ronde predict` is on two ranks than on one, and what it writes while ranks are killed.

    python benchmarks/predict.py --rows 100000 --rounds 3

A multilayer perceptron predicts the rows of a CSV file with one thread per rank. One rank and two take turns, from the
start of the command to its end, and the median counts. At last a rank is killed every few seconds, and the output is
compared, byte by byte, with that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from serving import make_model

from ronde.serve.model import ONNX_NAME, load_model_folder, write_metadata

NUM_COLUMNS = 32


def write_model_folder(path: Path, hidden: int) -> None:
    """As `ronde export` makes it."""
    path.mkdir()
    make_model(path / ONNX_NAME, hidden, NUM_COLUMNS)
    write_metadata(path, load_model_folder(path).metadata)


def write_rows(path: Path, num_rows: int) -> None:
    """The rows repeat after a while: what they hold does not matter, and the file is written faster."""
    values = np.random.default_rng(0).integers(0, 256, (1000, NUM_COLUMNS))
    texts = [",".join(map(str, row)) for row in values]
    with path.open("w") as file:
        file.write("id," + ",".join(f"c{number}" for number in range(NUM_COLUMNS)) + "\n")
        for row in range(num_rows):
            file.write(f"{row},{texts[row % len(texts)]}\n")


def run_predict(folder: Path, num_ranks: int, *, kill_every_s: float = 0.0, seed: int = 0) -> tuple[float, int]:
    """Seconds from the start to the end, and the number of ranks that were killed."""
    columns = ",".join(f"c{number}" for number in range(NUM_COLUMNS))
    words = [sys.executable, "-m", "ronde.cli.main", "predict", "--model", "mlp", "--input", "rows.csv"]
    words += ["--output", "out.csv", "--columns", f"x={columns}", "--keep", "id", "-np", str(num_ranks)]
    for path in folder.glob("out.csv*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    choose, num_killed, began_s = random.Random(seed), 0, time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log)
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(choose.uniform(0.5, 1.5) * kill_every_s if kill_every_s else None)
                break
            ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if is_rank(each)]
            if ranks:
                with contextlib.suppress(psutil.Error):
                    choose.choice(ranks).kill()
                    num_killed += 1
    if process.returncode:
        raise SystemExit((folder / "log").read_text())
    return time.perf_counter() - began_s, num_killed


def is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "--worker" in process.cmdline()
    return False


def check_rows(path: Path, num_rows: int) -> None:
    """Every row is there once, in order."""
    with path.open() as file:
        next(file)
        for row, line in enumerate(file):
            number, id, _ = line.split(",", 2)
            assert int(number) == int(id) == row, (row, line[:60])
    assert row + 1 == num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Batch prediction on one and on two ranks, and under kills.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--hidden", type=int, default=2048, help="units of each of the two hidden layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model_folder(folder / "mlp", options.hidden)
        write_rows(folder / "rows.csv", options.rows)
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(options.rounds):
            for num_ranks, found in seconds.items():
                found.append(run_predict(folder, num_ranks)[0])
                print(json.dumps({"ranks": num_ranks, "seconds": round(found[-1], 2)}), flush=True)
        check_rows(folder / "out.csv", options.rows)
        undisturbed = (folder / "out.csv").read_bytes()
        medians = {num_ranks: statistics.median(found) for num_ranks, found in seconds.items()}
        rates = {f"rows/s of {num_ranks}": round(options.rows / each) for num_ranks, each in medians.items()}
        print(json.dumps({**rates, "speedup": round(medians[1] / medians[2], 2)}))
        killed_s, num_killed = run_predict(folder, 2, kill_every_s=options.kill_every)
        check_rows(folder / "out.csv", options.rows)
        is_same = (folder / "out.csv").read_bytes() == undisturbed
        print(json.dumps({"kills": num_killed, "seconds": round(killed_s, 2), "same bytes": is_same}))


if __name__ == "__main__":
    main()
