"""Everything that scripts import is there, takes what they give it in the order in which they give it."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import horovod
import horovod.torch as hvd
from horovod.torch import mpi_ops, optimizer

BASICS = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
    cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
    cuda_built rocm_built""".split()
SETS = "ProcessSet global_process_set add_process_set remove_process_set".split()
OPS = "Average Sum Adasum Min Max Product".split()
MORE = "Compression DistributedOptimizer HorovodInternalError SyncBatchNorm check_extension is_master".split()

REDUCING = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set"
DIFFERENTIABLE = "average=None, name=None, compression, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set"
SCATTERING = "op=0, process_set, prescale_factor=1.0, postscale_factor=1.0"

SIGNATURES = {
    "allreduce": f"tensor, {DIFFERENTIABLE}",
    "allreduce_": f"tensor, {REDUCING}",
    "allreduce_async": f"tensor, {REDUCING}",
    "allreduce_async_": f"tensor, {REDUCING}",
    "grouped_allreduce": f"tensors, {DIFFERENTIABLE}",
    "grouped_allreduce_": f"tensors, {REDUCING}",
    "grouped_allreduce_async": f"tensors, {REDUCING}",
    "grouped_allreduce_async_": f"tensors, {REDUCING}",
    "sparse_allreduce_async": "tensor, name, op, process_set",
    "allgather": "tensor, name=None, process_set",
    "allgather_async": "tensor, name=None, process_set",
    "grouped_allgather": "tensors, name=None, process_set",
    "grouped_allgather_async": "tensors, name=None, process_set",
    "broadcast": "tensor, root_rank, name=None, process_set",
    "broadcast_": "tensor, root_rank, name=None, process_set",
    "broadcast_async": "tensor, root_rank, name=None, process_set",
    "broadcast_async_": "tensor, root_rank, name=None, process_set",
    "alltoall": "tensor, splits=None, name=None, process_set",
    "alltoall_async": "tensor, splits=None, name=None, process_set",
    "reducescatter": f"tensor, name=None, compression, {SCATTERING}",
    "reducescatter_async": f"tensor, name=None, {SCATTERING}",
    "grouped_reducescatter": f"tensors, name=None, compression, {SCATTERING}",
    "grouped_reducescatter_async": f"tensors, name=None, {SCATTERING}",
    "join": "device=-1",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set",
    "allgather_object": "obj, name=None",
    "start_timeline": "file_path, mark_cycles=False",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression, backward_passes_per_step=1, op=0, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set"
    ),
}
"""Arguments in their order, with defaults that are numbers or None; the default of process_set is the global one."""


def shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    plain = default is None or isinstance(default, int | float)
    return f"{parameter.name}={default}" if plain else parameter.name


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_in_horovods_order(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters.values()
    assert ", ".join(map(shown, parameters)) == SIGNATURES[name]
    for parameter in parameters:
        if parameter.name == "process_set":
            assert parameter.default is hvd.global_process_set
        if parameter.name == "compression":
            assert parameter.default is hvd.Compression.none


def test_hvd_has_horovods_names() -> None:
    expected = {*BASICS, *SETS, *OPS, *MORE, *SIGNATURES}
    assert set(hvd.__all__) == expected
    assert all(hasattr(hvd, name) for name in expected)


def test_the_ops_are_the_numbers_they_were() -> None:
    assert [getattr(hvd, name) for name in OPS] == [0, 1, 2, 3, 4, 5]


def test_mpi_ops_has_what_was_only_there() -> None:
    kinds = ("Allreduce", "Allgather", "Broadcast", "Alltoall", "Reducescatter")
    classes = [f"Horovod{kind}" for kind in kinds]
    classes += [f"HorovodGrouped{kind}" for kind in ("Allreduce", "Allgather", "Reducescatter")]
    for name in (*classes, "is_homogeneous", "handle_average_backwards_compatibility", "_basics"):
        assert hasattr(mpi_ops, name)


def test_the_classes_of_optimizers_have_the_names_that_scripts_ask_for() -> None:
    assert issubclass(optimizer._DistributedOptimizer, torch.optim.Optimizer)
    assert issubclass(optimizer._DistributedAdasumOptimizer, torch.optim.Optimizer)


def test_the_package_has_run_and_a_version() -> None:
    assert horovod.__all__ == ["__version__", "run"]
    assert horovod.__version__.startswith("0.28.1")


@pytest.mark.parametrize("name", ["spark", "ray"])
def test_what_is_not_there_yet_says_so(name: str) -> None:
    with pytest.raises(ImportError, match=f"horovod.{name} is not part of ronde-horovod yet"):
        importlib.import_module(f"horovod.{name}")


def test_elastic_comes_with_hvd() -> None:
    assert hvd.elastic.__all__ == ["ElasticSampler", "TorchState", "run"]
