"""Everything that scripts import is there, and takes what they give it in the order in which they give it."""

from __future__ import annotations

import inspect
from typing import Any

import horovod.keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras
from tests.compat.tensorflow_checks.registry import check

BASICS = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
    cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
    cuda_built rocm_built is_master""".split()
SETS = "ProcessSet global_process_set add_process_set remove_process_set".split()

REDUCING = (
    "average=None, device_dense=, device_sparse=, compression, op=None, prescale_factor=1.0, postscale_factor=1.0"
)
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
OPTIMIZER = "device_dense=, device_sparse=, compression, sparse_as_dense=False"
TAPE = f"gradtape, {OPTIMIZER}, op=0, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set"
KERAS = f"optimizer, name=None, {OPTIMIZER}, gradient_predivide_factor=1.0, op=0"
PASSES = "backward_passes_per_step=1, average_aggregated_gradients=False"

TENSORFLOW = {
    "allreduce": f"tensor, {REDUCING}, name=None, process_set, ignore_name_scope=False",
    "grouped_allreduce": f"tensors, {REDUCING}, process_set, ignore_name_scope=False, name=None",
    "allgather": "tensor, name=None, ignore_name_scope=False, process_set",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set",
    "broadcast_": "variables, root_rank, name=None, process_set",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set",
    "reducescatter": (
        f"tensor, device_dense=, compression, op=0, name=None, process_set, ignore_name_scope=False, {SCALES}"
    ),
    "grouped_reducescatter": f"tensors, device_dense=, compression, op=0, process_set, {SCALES}",
    "join": "",
    "size_op": "process_set_id=0, name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "broadcast_variables": "variables, root_rank, process_set, inplace=False",
    "broadcast_global_variables": "root_rank",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, process_set",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set",
    "allgather_object": "obj, session=None, name=None, process_set",
    "BroadcastGlobalVariablesHook": "root_rank, device=",
    "DistributedGradientTape": f"{TAPE}, scale_local_gradients=True",
    "PartialDistributedGradientTape": f"{TAPE}, local_layers=None, scale_local_gradients=True",
    "DistributedOptimizer": (
        f"optimizer, name=None, use_locking=False, {OPTIMIZER}, backward_passes_per_step=1, op=0, "
        "gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None, process_set, "
        "scale_local_gradients=True"
    ),
}
VALUES = {
    "broadcast_global_variables": "root_rank",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=0",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression, legacy_opts=False",
}
TENSORFLOW_KERAS = {
    **VALUES,
    "allreduce": f"value, name=None, average=None, {SCALES}, op=None, compression",
    "DistributedOptimizer": (f"{KERAS}, {PASSES}, num_groups=0, groups=None, process_set, scale_local_gradients=True"),
}
PLAIN_KERAS = {
    **VALUES,
    "allreduce": f"value, name=None, average=True, {SCALES}, op=None, compression",
    "DistributedOptimizer": f"{KERAS}, num_groups=0, groups=None",
    "PartialDistributedOptimizer": (
        f"{KERAS}, {PASSES}, groups=None, process_set, local_layers=None, scale_local_gradients=True"
    ),
}


def shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    plain = default is None or isinstance(default, int | float | str)
    return f"{parameter.name}={default}" if plain else parameter.name


def check_signatures(module: Any, signatures: dict[str, str]) -> None:
    for name, expected in signatures.items():
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        assert ", ".join(map(shown, parameters)) == expected, f"{module.__name__}.{name}"


@check
def arguments_stand_in_horovods_order() -> None:
    check_signatures(hvd, TENSORFLOW)
    check_signatures(horovod.tensorflow.keras, TENSORFLOW_KERAS)
    check_signatures(horovod.keras, PLAIN_KERAS)


@check
def the_modules_have_horovods_names() -> None:
    ops = "Average Sum Adasum Min Max Product".split()
    more = """Compression HorovodInternalError SyncBatchNormalization check_extension gpu_available is_homogeneous
        refs_to_vars split_list vars_to_refs""".split()
    assert set(hvd.__all__) == {*BASICS, *SETS, *ops, *more, *TENSORFLOW}
    shared = {*BASICS, "Average", "Sum", "Compression", "callbacks", "elastic"}
    assert set(horovod.tensorflow.keras.__all__) == {*shared, *SETS, *TENSORFLOW_KERAS}
    assert set(horovod.keras.__all__) == {*shared, "global_process_set", "Adasum", *PLAIN_KERAS}
    for module in (hvd, horovod.tensorflow.keras, horovod.keras):
        assert all(hasattr(module, name) for name in module.__all__)
    for name in ("mpi_ops", "util", "functions", "compression", "elastic", "_executing_eagerly", "_make_subgraph"):
        assert hasattr(hvd, name), name
    assert [getattr(hvd, name) for name in ops] == [0, 1, 2, 3, 4, 5]
    callbacks = """BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback
        LearningRateWarmupCallback MetricAverageCallback""".split()
    assert horovod.keras.callbacks.__all__ == horovod.tensorflow.keras.callbacks.__all__ == callbacks
