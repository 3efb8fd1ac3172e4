"""The main job: AlexNet on an image folder, on any number of ranks.

    ronde run -np 2 python examples/imagenet/train.py                       the handwritten digits of scikit-learn
    ronde run -np 8 python examples/imagenet/train.py --data /data/imagenet --amp

Ended in the middle (Ctrl-C, SIGKILL, a lost host) and started again, it goes on from the last checkpoint exactly as if
nothing had been: the sampler knows which images are used up, and the random numbers of a step depend on the seed, the
step and the rank alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from digits import write_digits
from images import Batch, Images, crop_centre, crop_randomly, make_loader, read_index
from model import AlexNet, normalize, num_parameters
from options import Options, parse
from prepare import prepare
from progress import Display, Telling, is_finished, tell_result
from scalars import Scalars
from torch import Tensor
from torch.nn.functional import cross_entropy

import ronde
import ronde.torch
from ronde.dash import RunLog
from ronde.torch import ShardedSampler, average_metrics


class Trainer:
    """Model, data and everything that has to go on after a restart."""

    def __init__(self, options: Options, cache: Path) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = torch.device(f"cuda:{ronde.local_rank()}" if torch.cuda.is_available() else "cpu")
        self.splits = {name: Images(cache, name) for name in read_index(cache).splits}
        self.sampler = ShardedSampler(self.splits["train"], seed=options.seed)
        self.loader = make_loader(self.splits["train"], self.sampler, options.batch_size, options.workers)
        steps_per_epoch = -(-len(self.sampler) // options.batch_size)
        self.num_steps = steps_per_epoch * options.epochs
        self.step = 0

        num_classes = len(read_index(cache).classes)
        self.model = AlexNet(num_classes, image_size=options.image_size, width=options.width).to(self.device)
        ronde.torch.broadcast_parameters(self.model)
        lr = ronde.torch.scale_lr(options.lr, rule="sqrt")
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01, fused=True)
        self.optimizer = ronde.torch.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        num_warm = round(options.warmup * self.num_steps)
        after = ronde.torch.cosine(max(1, self.num_steps - num_warm))
        self.schedule = ronde.torch.warmup(self.optimizer, num_warm, start=0.1, after=after)

        self.checkpoints = ronde.torch.Checkpoints(
            options.checkpoint,
            keep=2,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            sampler=self.sampler,
        )
        self.saved_s = time.monotonic()

    def resume(self, log: Path) -> None:
        """Go on where an unfinished run was, unless --fresh is given. A finished one starts over by itself."""
        if self.options.fresh or (is_finished(log) and not self.options.resume):
            self.checkpoints.clear()  # so that they are not taken for those of the new run
            return
        restored = self.checkpoints.restore()
        if restored is None and self.options.resume:
            raise SystemExit(f"there is no checkpoint in {self.options.checkpoint} to resume from")
        self.step = restored.step if restored else 0

    def save(self, *, now: bool = False) -> None:
        """Write a checkpoint when it is time. Only rank 0 does, so the others need not agree on when that is."""
        if ronde.rank() == 0 and (now or time.monotonic() - self.saved_s >= self.options.checkpoint_s):
            self.checkpoints.save(self.step)
            self.saved_s = time.monotonic()

    def train_step(self, batch: Batch) -> Tensor:
        """One step; the loss on this rank's batch."""
        torch.manual_seed((self.options.seed * 1_000_003 + self.step) * 4096 + ronde.rank())
        images, labels = batch
        self.optimizer.zero_grad()
        loss = cross_entropy(self.scores(crop_randomly(images, self.options.image_size)), labels.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.detach()

    def scores(self, images: Tensor) -> Tensor:
        """What the model says of these images."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bool(self.options.amp)):
            scores: Tensor = self.model(normalize(images.to(self.device)))
        return scores.float()

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Loss and accuracy over all images of a split, each used exactly once."""
        self.model.eval()
        sampler = ShardedSampler(self.splits[split], shuffle=False, ends="uneven")
        loss, right, count = 0.0, 0, 0
        for images, labels in make_loader(self.splits[split], sampler, 4 * self.options.batch_size):
            scores, labels = self.scores(crop_centre(images, self.options.image_size)), labels.to(self.device)
            loss += float(cross_entropy(scores, labels, reduction="sum"))
            right += int((scores.argmax(1) == labels).sum())
            count += len(labels)
        self.model.train()
        mine = {"loss": loss / max(1, count), "accuracy": right / max(1, count)}
        return {f"{split}/{name}": value for name, value in average_metrics(mine, count=count).items()}


def train(trainer: Trainer, telling: Telling) -> None:
    """All epochs that are left."""
    while trainer.sampler.epoch < trainer.options.epochs:
        epoch = trainer.sampler.epoch + 1
        for batch in trainer.sampler.track(trainer.loader):
            with telling.log.step():
                loss = trainer.train_step(batch)
            telling.step(trainer.step, loss, len(batch[1]))
            trainer.save()
        telling.flush()
        values = trainer.evaluate("val")
        telling.values(trainer.step, values)
        telling.display.say(
            f"epoch {epoch}/{trainer.options.epochs}  validation: "
            f"loss {values['val/loss']:.3f}, accuracy {values['val/accuracy']:.2%}"
        )


def main() -> None:
    options = parse()
    # Large tensors in large pages, unless told otherwise: a quarter faster here. PyTorch looks when it makes the first.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    ronde.init()
    root = options.data or write_digits(options.cache / "digits")
    # Stored a little larger than the model sees them: a window at a random place of an image is almost a new image.
    cache = prepare(root, options.cache, round(options.image_size * 8 / 7))
    trainer = Trainer(options, cache)
    log_path = options.report / "log.jsonl"
    trainer.resume(log_path)
    gpu = torch.cuda.utilization if trainer.device.type == "cuda" else None
    with (
        Display(trainer.num_steps, trainer.step, silent=ronde.rank() != 0) as display,
        Scalars(options.tensorboard, trainer.step) as scalars,
        RunLog(log_path, facts=facts(trainer, root), step=trainer.step, gpu=gpu) as log,
    ):
        if trainer.step:
            display.say(f"going on after step {trainer.step} of {trainer.num_steps}")
        telling = Telling(log, display, scalars, lr=lambda: float(trainer.schedule.get_last_lr()[0]))
        train(trainer, telling)
        test = trainer.evaluate("test" if "test" in trainer.splits else "val")
        telling.values(trainer.step, test)
        trainer.save(now=True)
    tell_result(display, test, log_path, options.report / "report.html")
    ronde.shutdown()


def facts(trainer: Trainer, root: Path) -> dict[str, object]:
    """What the report says of this run."""
    options = trainer.options
    return {
        "model": f"AlexNet, {num_parameters(trainer.model) / 1e6:.1f} million parameters",
        "data": root,
        "images": ", ".join(f"{len(images)} {split}" for split, images in trainer.splits.items()),
        "image size": options.image_size,
        "epochs": options.epochs,
        "batch size": f"{options.batch_size} per rank, {options.batch_size * ronde.size()} in all",
        "learning rate": f"{trainer.schedule.base_lrs[0]:.3g}",
        "precision": "bfloat16 where safe" if options.amp else "float32",
        "device": trainer.device,
        "PyTorch": torch.__version__,
    }


if __name__ == "__main__":
    main()
