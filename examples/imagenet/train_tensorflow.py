"""The main job with TensorFlow: AlexNet on an image folder, on any number of ranks, in a loop of its own.

    ronde run -np 2 python examples/imagenet/train_tensorflow.py           the handwritten digits of scikit-learn
    ronde run -np 8 python examples/imagenet/train_tensorflow.py --data /data/imagenet --amp

Ended in the middle and started again, it goes on from the last checkpoint exactly as if nothing had been: a checkpoint
says which images of the epoch are used up, and the random numbers of a step depend on the seed, the step and the rank
alone. Only rank 0 writes and reads checkpoints; the others get what it has restored.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from digits import write_digits
from folder import ImageFolder, read_folder_once
from images_tensorflow import Images
from model_tensorflow import make_alexnet
from options import Options, parse
from progress import Display, Telling, is_finished, tell_result
from scalars import Scalars

import ronde
import ronde.tensorflow as rt
from ronde.dash import RunLog


class Trainer:
    """Model, data and everything that has to go on after a restart."""

    def __init__(self, options: Options, folder: ImageFolder) -> None:
        keras.utils.set_random_seed(options.seed)
        if options.amp:  # before the model is made
            keras.mixed_precision.set_global_policy(f"mixed_{options.amp}")
        self.options = options
        size, num_threads = options.image_size, options.workers
        self.splits = {name: Images(folder, name, image_size=size, num_threads=num_threads) for name in folder.splits}
        steps_per_epoch = math.ceil(math.ceil(len(self.splits["train"]) / ronde.size()) / options.batch_size)
        self.num_steps = steps_per_epoch * options.epochs

        self.model = make_alexnet(len(folder.classes), image_size=size, width=options.width)
        self.dropouts = [layer for layer in self.model.layers if isinstance(layer, keras.layers.Dropout)]
        lr = options.lr * math.sqrt(ronde.size())
        num_warm = round(options.warmup * self.num_steps)
        warmup = {"warmup_target": lr, "warmup_steps": num_warm} if num_warm else {}
        schedule = keras.optimizers.schedules.CosineDecay(
            lr * 0.1 if num_warm else lr, max(1, self.num_steps - num_warm), **warmup
        )
        self.optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, epsilon=1e-8)  # as in train.py
        if options.amp == "float16":  # small gradients would be zero without a loss scale
            self.optimizer = keras.mixed_precision.LossScaleOptimizer(self.optimizer)
        self.optimizer.build(self.model.trainable_variables)

        # Where training stands; consumed is how many images of the epoch all ranks together have used.
        self.position = {name: tf.Variable(0, dtype=tf.int64, name=name) for name in ("step", "epoch", "consumed")}
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, **self.position)
        self.checkpoints = tf.train.CheckpointManager(self.checkpoint, options.checkpoint, max_to_keep=2)
        self.saved_step, self.saved_s = 0, time.monotonic()

        # The last batch of an epoch may be smaller: one graph for all sizes.
        images, labels = tf.TensorSpec([None, size, size, 3], tf.uint8), tf.TensorSpec([None], tf.int32)
        self.train_step = tf.function(self._train_step, input_signature=[images, labels])
        self.test_step = tf.function(self._test_step, input_signature=[images, labels])

    @property
    def step(self) -> int:
        return int(self.position["step"])

    @property
    def epoch(self) -> int:
        return int(self.position["epoch"])

    def start(self, log: Path) -> None:
        """Go on where an unfinished run was, unless --fresh is given; a finished one starts over by itself. All ranks
        begin with what rank 0 has."""
        begin = self.options.fresh or (is_finished(log) and not self.options.resume)
        if ronde.rank() == 0:
            if begin:
                self._remove_checkpoints()  # so that they are not taken for those of the new run
            elif self.checkpoints.latest_checkpoint:
                self._restore(self.checkpoints.latest_checkpoint)
        rt.broadcast_variables([*self.model.variables, *self.optimizer.variables, *self.position.values()])
        if self.options.resume and self.step == 0:
            raise SystemExit(f"there is no checkpoint in {self.options.checkpoint} to resume from")

    def save(self, *, now: bool = False) -> None:
        """Write a checkpoint when it is time. Only rank 0 does, so the others need not agree on when that is."""
        due = now or time.monotonic() - self.saved_s >= self.options.checkpoint_s
        if ronde.rank() == 0 and due and self.step != self.saved_step:
            self.checkpoints.save(checkpoint_number=self.step)
            self.saved_step, self.saved_s = self.step, time.monotonic()

    def _restore(self, path: str) -> None:
        try:
            self.checkpoint.restore(path).assert_consumed()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            tf.get_logger().setLevel("ERROR")  # it would list every variable that was not restored
            raise SystemExit(
                f"cannot go on from {path}: {error}\ngive the options that it was made with, or --fresh to start over"
            ) from error
        self.saved_step = self.step

    def _remove_checkpoints(self) -> None:
        for path in self.checkpoints.checkpoints:
            for file in tf.io.gfile.glob(f"{path}.*"):
                tf.io.gfile.remove(file)
        listed = os.path.join(self.options.checkpoint, "checkpoint")  # noqa: PTH118  # it may be a URL
        if tf.io.gfile.exists(listed):
            tf.io.gfile.remove(listed)
        self.checkpoints = tf.train.CheckpointManager(self.checkpoint, self.options.checkpoint, max_to_keep=2)

    def _train_step(self, images: Any, labels: Any) -> Any:
        """One step; the loss on this rank's batch."""
        for number, dropout in enumerate(self.dropouts):  # so that a step that is done again is the same
            stream = (self.options.seed * 4096 + ronde.rank()) * len(self.dropouts) + number
            dropout.seed_generator.state.assign(tf.stack([tf.constant(stream, tf.int64), self.position["step"]]))
        with tf.GradientTape() as tape:
            scores = self.model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
            scaled = self.optimizer.scale_loss(loss)
        # Averaged before the loss scale looks for infinity: all ranks skip a step, or none.
        tape = rt.DistributedGradientTape(tape)
        gradients = tape.gradient(scaled, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.position["step"].assign_add(1)
        return loss

    def _test_step(self, images: Any, labels: Any) -> Any:
        """The sum of the losses of these images, and how many are right."""
        scores = self.model(images, training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        right = tf.equal(tf.argmax(scores, axis=1, output_type=tf.int32), labels)
        return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(right, tf.int32))

    def evaluate(self, split: str) -> dict[str, float]:
        """Loss and accuracy over all images of a split, each used exactly once."""
        loss, right, count = 0.0, 0, 0
        for images, labels in self.splits[split].evaluation_batches(4 * self.options.batch_size):
            batch_loss, batch_right = self.test_step(images, labels)
            loss, right, count = loss + float(batch_loss), right + int(batch_right), count + len(labels)
        mine = {"loss": loss / max(1, count), "accuracy": right / max(1, count)}
        return {f"{split}/{name}": value for name, value in rt.average_metrics(mine, count=count).items()}


def train(trainer: Trainer, telling: Telling) -> None:
    """All epochs that are left."""
    options, images = trainer.options, trainer.splits["train"]
    epoch, consumed = trainer.position["epoch"], trainer.position["consumed"]
    while trainer.epoch < options.epochs:
        for batch in images.training_batches(
            options.batch_size, seed=options.seed, epoch=trainer.epoch, consumed=int(consumed)
        ):
            with telling.log.step():
                loss = trainer.train_step(*batch)
            num_images = len(batch[1])
            consumed.assign(min(int(consumed) + ronde.size() * num_images, len(images)))
            telling.step(trainer.step, loss, num_images)
            trainer.save()
        telling.flush()
        epoch.assign_add(1)
        consumed.assign(0)
        values = trainer.evaluate("val")
        telling.values(trainer.step, values)
        telling.display.say(
            f"epoch {trainer.epoch}/{options.epochs}  validation: "
            f"loss {values['val/loss']:.3f}, accuracy {values['val/accuracy']:.2%}"
        )


def use_own_devices() -> None:
    """One GPU, and this rank's share of the cores."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        gpu = gpus[ronde.local_rank() % len(gpus)]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))  # `ronde run` sets it, and TensorFlow does not read it
    if num_threads:
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)


def main() -> None:
    options = parse(run="runs/alexnet-tensorflow", precisions=("bfloat16", "float16"))
    if keras.backend.backend() != "tensorflow":
        raise SystemExit(f"this job needs Keras on TensorFlow, and KERAS_BACKEND is {keras.backend.backend()}")
    ronde.init()
    use_own_devices()
    folder = read_folder_once(options.data or write_digits(options.cache / "digits"))
    trainer = Trainer(options, folder)
    log_path = options.report / "log.jsonl"
    trainer.start(log_path)
    with (
        Display(trainer.num_steps, trainer.step, silent=ronde.rank() != 0) as display,
        Scalars(options.tensorboard, trainer.step) as scalars,
        RunLog(log_path, facts=facts(trainer, folder.root), step=trainer.step) as log,
    ):
        if trainer.step:
            display.say(f"going on after step {trainer.step} of {trainer.num_steps}")
        telling = Telling(log, display, scalars, lr=lambda: float(trainer.optimizer.learning_rate))
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
        "model": f"AlexNet, {trainer.model.count_params() / 1e6:.1f} million parameters",
        "data": root,
        "images": ", ".join(f"{len(images)} {split}" for split, images in trainer.splits.items()),
        "image size": options.image_size,
        "epochs": options.epochs,
        "batch size": f"{options.batch_size} per rank, {options.batch_size * ronde.size()} in all",
        "learning rate": f"{options.lr * math.sqrt(ronde.size()):.3g}",
        "precision": f"{options.amp} where safe" if options.amp else "float32",
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
    }


if __name__ == "__main__":
    main()
