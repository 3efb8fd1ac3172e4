"""A script of TensorFlow's own ParameterServerStrategy, as its documentation has it, started in every role."""

from __future__ import annotations

import tensorflow as tf

NUM_STEPS = 12


def main() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        cluster, kind, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
        tf.distribute.Server(cluster, job_name=kind, task_index=index, protocol="grpc").join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros(2))]

    @tf.function  # type: ignore[untyped-decorator]
    def take_step() -> None:
        def update() -> None:
            for each in weights:
                each.assign_add(tf.ones_like(each))

        strategy.run(update)

    for _ in range(NUM_STEPS):
        coordinator.schedule(take_step)
    coordinator.join()
    for each in weights:
        print(f"{float(each[0])} updates on {each.device}", flush=True)


if __name__ == "__main__":
    main()
