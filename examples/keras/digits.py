"""digits.py: Keras 3 on two ranks, on the backend of your choice.

    KERAS_BACKEND=jax ronde run -np 2 python examples/keras/digits.py

KERAS_BACKEND is tensorflow, torch or jax. A saved model is one that Keras loads without ronde.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import ronde
import ronde.keras

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--save", type=Path, help="write the model of the best epoch to this .keras file")
options = parser.parse_args()

ronde.init()
rank, size = ronde.rank(), ronde.size()
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x, y = digits.data[order].astype("float32") / 16, digits.target[order]
# 32 of the images for each rank in a step; in each epoch another order, which is the same on all ranks.
train = ronde.keras.shard((x[:1500], y[:1500]), per_rank_batch=32, seed=0)
x_test, y_test = x[1500 + rank :: size], y[1500 + rank :: size]  # here one rank may have more

model = keras.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)
lr = 0.05 * size
model.compile(
    ronde.keras.DistributedOptimizer(keras.optimizers.SGD(lr, momentum=0.9)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    ronde.keras.callbacks.BroadcastInitialState(),
    ronde.keras.callbacks.MetricAverage(),
    ronde.keras.callbacks.LearningRateWarmup(lr, warmup_epochs=3),
]
if options.save:
    best = ronde.keras.callbacks.ModelCheckpoint(str(options.save), monitor="val_accuracy", save_best_only=True)
    callbacks.append(best)
model.fit(
    train,
    shuffle=False,  # that is done by shard()
    epochs=options.epochs,
    validation_data=(x_test, y_test),
    callbacks=callbacks,
    verbose=2 if rank == 0 else 0,
)

scores = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
scores = ronde.keras.average_metrics(scores, count=len(x_test))
if rank == 0:
    backend = keras.backend.backend()
    print(f"test accuracy with {size} rank(s) on {backend}: {100 * scores['accuracy']:.1f}%")
ronde.shutdown()
