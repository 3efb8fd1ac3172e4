"""digits.py: gluon of MXNet on two ranks.

    ronde run -np 2 python examples/mxnet/digits.py

It needs mxnet 1.9.1, numpy below 1.24 and scikit-learn.
"""

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

import ronde
import ronde.mxnet

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--fp16", action="store_true", help="send gradients with 16 bits per number")
options = parser.parse_args()

ronde.init()
rank, size = ronde.rank(), ronde.size()
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x, y = digits.data[order].astype("float32") / 16, digits.target[order].astype("float32")
x_test, y_test = x[1500 + rank :: size], y[1500 + rank :: size]  # one rank may have more

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(256, activation="relu"), gluon.nn.Dropout(0.2), gluon.nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
trainer = ronde.mxnet.DistributedTrainer(
    net.collect_params(),
    "sgd",
    {"learning_rate": 0.05 * size, "momentum": 0.9},
    compression="fp16" if options.fp16 else None,
)
trainer.broadcast_parameters()  # of rank 0; they get their shapes, and values, in the first forward pass

loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
batches = ronde.mxnet.ShardedBatches(1500, per_rank_batch=32, seed=1)
while batches.epoch < options.epochs:
    epoch, losses = batches.epoch, []
    for indices in batches:
        with autograd.record():
            loss = loss_function(net(mx.nd.array(x[indices])), mx.nd.array(y[indices]))
        loss.backward()
        trainer.step(len(indices))
        losses.append(loss.mean())
    mean = ronde.mxnet.average_metrics({"loss": sum(losses).asscalar() / len(losses)})["loss"]
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)

metric = mx.metric.Accuracy()
metric.update([mx.nd.array(y_test)], [net(mx.nd.array(x_test))])
accuracy = ronde.mxnet.average_metrics(metric)["accuracy"]  # of all test samples, each of which counts once
if rank == 0:
    print(f"test accuracy with {size} rank(s): {100 * accuracy:.1f}%")
ronde.shutdown()
