"""The command line of the main job, with PyTorch and with TensorFlow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Options", "parse"]

DIGITS_SIZE = 64
IMAGENET_SIZE = 224


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for; below --run lies everything that was not given a place of its own."""

    data: Path | None
    cache: Path
    run: Path
    checkpoint: str
    report: Path
    tensorboard: Path
    resume: bool
    fresh: bool
    checkpoint_s: float
    epochs: int
    batch_size: int
    lr: float
    warmup: float
    image_size: int
    width: int
    workers: int
    amp: str | None
    seed: int


def parse(
    argv: Sequence[str] | None = None, *, run: str = "runs/alexnet", precisions: Sequence[str] = ("bfloat16",)
) -> Options:
    """Read the command line; the defaults are those of the digits, except where ImageNet needs others. `run` is the
    default of --run, and `precisions` are what --amp may be, by default the first."""
    parser = argparse.ArgumentParser(
        description="Train AlexNet on an image folder in ImageNet's layout, on any number of ranks.",
        epilog="A run that was ended in the middle goes on where it was; one that is finished starts over.",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, help="folder with {train,val,test}/CLASS/*.jpg; default: digits")
    data.add_argument("--cache", type=Path, default=Path("runs/cache"), help="prepared images (default: %(default)s)")
    data.add_argument("--image-size", type=int, help=f"pixels (default: {IMAGENET_SIZE}; digits {DIGITS_SIZE})")
    data.add_argument("--workers", type=int, default=0, help="processes (TensorFlow: threads) that load batches")
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, help="default: 90; digits 6")
    training.add_argument("--batch-size", type=int, help="per rank (default: 128; digits 16)")
    training.add_argument("--lr", type=float, default=2e-4, help="of one rank; grows with the root of the ranks")
    training.add_argument("--warmup", type=float, default=0.1, help="part of the training (default: %(default)s)")
    training.add_argument("--width", type=int, default=4096, help="of the dense layers (default: %(default)s)")
    amp = f"compute in {' or '.join(precisions)} where that is safe"
    training.add_argument("--amp", nargs="?", const=precisions[0], choices=precisions, help=amp)
    training.add_argument("--seed", type=int, default=0)
    results = parser.add_argument_group("results")
    results.add_argument("--run", type=Path, default=Path(run), help="folder (default: %(default)s)")
    results.add_argument("--checkpoint", help="folder or URL of checkpoints (default: RUN/checkpoints)")
    results.add_argument("--checkpoint-s", type=float, default=30.0, help="seconds between two (default: %(default)s)")
    results.add_argument("--resume", action="store_true", help="insist on going on from a checkpoint")
    results.add_argument("--fresh", action="store_true", help="start over, whatever there is")
    results.add_argument("--report", type=Path, help="folder of log and HTML report (default: RUN)")
    results.add_argument("--tensorboard", type=Path, help="folder of scalars (default: RUN/tensorboard)")
    given = vars(parser.parse_args(argv))
    if given["resume"] and given["fresh"]:
        parser.error("--resume and --fresh contradict each other")
    return Options(**_with_defaults(given))


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    run: Path = given["run"]
    digits = given["data"] is None
    defaults = {
        "image_size": DIGITS_SIZE if digits else IMAGENET_SIZE,
        "epochs": 6 if digits else 90,
        "batch_size": 16 if digits else 128,
        "checkpoint": str(run / "checkpoints"),
        "report": run,
        "tensorboard": run / "tensorboard",
    }
    return {name: defaults.get(name) if value is None else value for name, value in given.items()}
