"""AlexNet on data that `ronde data prepare` has made: the training of docs/tutorials/from-images-to-service.md.

    ronde run -np 2 python train_prepared.py --data data/photos --lr 0.0005

Checkpoints go to --run, and a run that was ended in the middle goes on where it was; with other data or settings it
begins anew. The last line is a JSON object with the loss and the accuracy on the split `val`: `ronde search` reads it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import crop_centre, crop_randomly
from model import AlexNet, normalize
from torch import Tensor
from torch.nn.functional import cross_entropy

import ronde
import ronde.torch
from ronde.data import Stream


def evaluate(model: AlexNet, stream: Stream, size: int) -> dict[str, float]:
    """Loss and accuracy on this rank's share of a split, averaged over all ranks."""
    model.eval()
    loss = correct = count = 0.0
    with torch.no_grad():
        for batch in stream:
            labels = torch.from_numpy(batch["label"])
            scores = model(normalize(crop_centre(as_tensor(batch), size)))
            loss += float(cross_entropy(scores, labels, reduction="sum"))
            correct += float((scores.argmax(1) == labels).sum())
            count += len(labels)
    model.train()
    mine = {"val_loss": loss / max(1.0, count), "val_accuracy": correct / max(1.0, count)}
    return {name: float(value) for name, value in ronde.torch.average_metrics(mine, count=count).items()}


def as_tensor(batch: dict[str, Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(batch["image"]))


def begin_run(folder: Path, settings: dict[str, Any]) -> None:
    """Remove the checkpoints of a run with other settings. Collective."""
    if ronde.rank() == 0:
        file = folder / "settings.json"
        if file.exists() and json.loads(file.read_text()) != settings:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    ronde.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train AlexNet on prepared data.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="folder of checkpoints; none are written without it")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    ronde.init()
    torch.manual_seed(1)
    train = Stream(options.data, split="train", global_batch=options.batch_size, seed=1)
    val = Stream(options.data, split="val", global_batch=options.batch_size, shuffle=False)
    model = AlexNet(len(train.classes), image_size=options.image_size, width=options.width)
    ronde.torch.broadcast_parameters(model)
    optimizer = ronde.torch.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=options.lr), named_parameters=model.named_parameters()
    )
    checkpoints = None
    if options.run:
        index = hashlib.sha256((options.data / "index.json").read_bytes()).hexdigest()
        settings = {name: str(value) for name, value in vars(options).items() if name not in ("run", "epochs")}
        begin_run(options.run, {**settings, "index": index})
        checkpoints = ronde.torch.Checkpoints(options.run, keep=1, model=model, optimizer=optimizer, data=train)
        checkpoints.restore()
    while train.epoch < options.epochs:
        for batch in train:
            optimizer.zero_grad()
            scores = model(normalize(crop_randomly(as_tensor(batch), options.image_size)))
            cross_entropy(scores, torch.from_numpy(batch["label"])).backward()
            optimizer.step()
        if checkpoints is not None:
            checkpoints.save(train.epoch)
    result = evaluate(model, val, options.image_size)
    if ronde.rank() == 0:
        print(json.dumps(result), flush=True)
    ronde.shutdown()


if __name__ == "__main__":
    main()
