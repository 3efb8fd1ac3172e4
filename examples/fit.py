"""fit.py: fit a plane; every rank has data of its own."""

import numpy as np

import ronde

ronde.init()
random = np.random.default_rng(seed=ronde.rank())
x = random.normal(size=(1000, 3))
y = x @ np.array([1.0, -2.0, 0.5])

weights = ronde.broadcast(np.zeros(3), root=0)
for _ in range(100):
    gradient = 2 * x.T @ (x @ weights - y) / len(x)
    weights -= 0.1 * ronde.allreduce(gradient, op="mean")

if ronde.rank() == 0:
    print(f"{ronde.size()} ranks found {weights.round(3).tolist()}")
ronde.shutdown()
