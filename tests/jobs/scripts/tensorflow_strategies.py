"""What each rank of tests/jobs/test_universal.py does with TensorFlow's own strategies.

`python tensorflow_strategies.py together|alone plain|ronde|horovod FOLDER NAME` writes FOLDER/NAME-RANK.json. What is
`plain` knows nothing of ronde; the others call ronde.init() or hvd.init() before they make a strategy. A process does
either `together` or `alone`: MultiWorkerMirroredStrategy has to come first, and after it MirroredStrategy would take
the devices of other workers for its own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

tf: Any = importlib.import_module("tensorflow")  # without types, and not installed where types are checked


class Library:
    """What the script uses besides TensorFlow."""

    def __init__(self, name: str) -> None:
        self._module: Any = None
        if name == "ronde":
            self._module = importlib.import_module("ronde.tensorflow")
            importlib.import_module("ronde").init(start_s=60.0, operation_s=60.0)
            self.rank = int(importlib.import_module("ronde").rank())
        elif name == "horovod":
            self._module = importlib.import_module("horovod.tensorflow")
            self._module.init()
            self.rank = int(self._module.rank())
        else:
            self.rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
        self._options = {"op": self._module.Sum} if name == "horovod" else {}

    def sum(self, number: float) -> float | None:
        """The sum over all ranks, which is also a barrier; None without a library."""
        return None if self._module is None else float(self._module.allreduce(tf.constant(number), **self._options))


def main() -> None:
    mode, library, folder, name = sys.argv[1], Library(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    found = {"together": together, "alone": alone}[mode](library, folder)
    found["sum"] = library.sum(library.rank + 1.0)  # also: nobody leaves before the others
    (folder / f"{name}-{library.rank}.json").write_text(json.dumps(found))


def together(library: Library, folder: Path) -> dict[str, Any]:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return {"task": strategy.cluster_resolver.task_id, **train(library, strategy, folder / "together")}


def alone(library: Library, folder: Path) -> dict[str, Any]:
    """MirroredStrategy, and then graphs with sessions, as in TensorFlow 1, with both strategies."""
    found = train(library, tf.distribute.MirroredStrategy(), folder / "alone")
    return {**found, "graph": graph(library), **graph_without_devices()}


def graph_without_devices() -> dict[str, Any]:
    """In a graph, the devices that MirroredStrategy takes by itself, and how its session fails for that."""
    v1, error = tf.compat.v1, "none"
    with tf.Graph().as_default(), (strategy := tf.distribute.MirroredStrategy()).scope():
        v1.get_variable("weight", initializer=1.0, use_resource=True)
        initialize = v1.global_variables_initializer()
        with v1.Session() as session:
            try:
                session.run(initialize)
            except tf.errors.InvalidArgumentError as raised:
                error = raised.message
    return {"graph devices": strategy.extended.worker_devices, "graph error": error}


def train(library: Library, strategy: Any, folder: Path) -> dict[str, Any]:
    """One epoch of a custom loop, from the latest checkpoint."""
    with strategy.scope():
        weights = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation.MEAN)
    checkpoint = tf.train.Checkpoint(weights=weights)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=1)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    library.sum(0.0)  # of ranks that train alone, rank 0 writes the next one only when all have read this one
    before = weights.numpy().tolist()

    def replica_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(batch[:, None] * (weights + 1.0))
        gradient = tape.gradient(loss, weights)
        weights.assign_add(tf.distribute.get_replica_context().all_reduce("sum", gradient))
        return loss

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(batch: Any) -> Any:
        return strategy.reduce("sum", strategy.run(replica_step, args=(batch,)), axis=None)

    dataset = tf.data.Dataset.range(1, 9).map(lambda number: tf.cast(number, tf.float32)).batch(4)
    losses = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    if library.rank == 0:
        manager.save()
    after = weights.numpy().tolist()
    return {"replicas": strategy.num_replicas_in_sync, "loss": losses[0], "weights": [before, after]}


def graph(library: Library) -> list[tuple[int, float]]:
    """For each strategy the number of replicas, and the sum of all their ranks, each plus 1."""
    v1, found = tf.compat.v1, []
    for kind in (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy):
        with tf.Graph().as_default():
            if kind is tf.distribute.MirroredStrategy:
                strategy, target, config = kind(["/cpu:0"]), "", None
            else:
                strategy, resolver = kind(), tf.distribute.cluster_resolver.TFConfigClusterResolver()
                config = strategy.update_config_proto(v1.ConfigProto(allow_soft_placement=True))
                task = {"job_name": resolver.task_type, "task_index": resolver.task_id}
                target = tf.distribute.Server(resolver.cluster_spec(), **task, config=config).target
            found.append((strategy.num_replicas_in_sync, run_session(library, strategy, target, config)))
    return found


def run_session(library: Library, strategy: Any, target: str, config: Any) -> float:
    v1 = tf.compat.v1
    with strategy.scope():
        weight = v1.get_variable("weight", initializer=1.0, use_resource=True)

        def replica_step() -> Any:
            return tf.distribute.get_replica_context().all_reduce("sum", weight * (library.rank + 1.0))

        (total,) = strategy.experimental_local_results(strategy.run(replica_step))
        initialize = v1.global_variables_initializer()
        with v1.Session(target, config=config) as session:
            session.run(initialize)
            return float(session.run(total))


if __name__ == "__main__":
    main()
