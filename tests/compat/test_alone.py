"""A script that nobody has launched: one process. And what is refused before anything travels."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import horovod.torch as hvd
import horovod.torch.optimizer as optimizer_module
from horovod.common import exceptions, process_sets, util
from horovod.common.basics import HorovodBasics
from horovod.common.process_sets import ProcessSet
from horovod.runner.launch import check_build
from horovod.runner.util.threads import in_thread
from horovod.torch.mpi_ops import HandleManager
from ronde.observe.stacks import dump_stacks
from tests.limits import CLOSING_S

MPI = "def Get_library_version(): return 'Some MPI 1.0'"


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def params(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


@pytest.mark.usefixtures("alone")
def test_one_process_is_a_job_too() -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (0, 1, 0, 1, 1)
    assert hvd.allreduce(torch.ones(2), name="x").tolist() == [1.0, 1.0]
    assert hvd.allgather_object("x") == ["x"]
    assert hvd.join() == 0
    hvd.barrier()
    net = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    with pytest.raises(ValueError, match="MPI is not in use"):
        hvd.mpi_threads_supported()


def test_before_init_everything_says_what_to_do() -> None:
    questions = [hvd.rank, hvd.size, ProcessSet([0]).included, lambda: hvd.start_timeline("x"), hvd.stop_timeline]
    optimizer = torch.optim.SGD(params(), lr=0.1)
    collectives: list[Callable[[], Any]] = [
        *(hvd.join, hvd.barrier, lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.broadcast_parameters(params(), 0)),
        *(lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1)),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
    ]
    for kind, calls in [(ValueError, questions), (hvd.HorovodInternalError, collectives)]:
        for call in calls:
            with pytest.raises(kind, match=r"use hvd\.init\(\)"):
                call()
    assert not hvd.is_initialized()
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"named_parameters": [torch.ones(1)]}, "tuples"),
        ({"named_parameters": lambda given: [("a", given[0]), ("a", given[1])]}, "must be unique"),
        ({"named_parameters": lambda given: [("a", given[0])]}, "does not name 1 of"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=hvd.Average"),
        ({"groups": 0}, "above 0"),
        ({"groups": "all"}, "above 0"),
        ({"groups": [["x"]]}, "made of parameters"),
        ({"groups": lambda given: [[given[0]], [given[0]]]}, "one of the groups only"),
        ({"compression": object}, "compression must be"),
        ({"op": hvd.Max}, r"hvd\.Average, hvd\.Sum or hvd\.Adasum, got 4"),
        ({"op": 77}, r"hvd\.Average, hvd\.Sum or hvd\.Adasum, got 77"),
    ],
)
def test_an_optimizer_is_not_made_of_nonsense(arguments: dict[str, Any], words: str) -> None:
    given = params()
    made = {
        name: value(given) if callable(value) and name != "compression" else value for name, value in arguments.items()
    }
    with pytest.raises(ValueError, match=words):
        hvd.DistributedOptimizer(torch.optim.SGD(given, lr=0.1), **made)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_is_wrapped_once() -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params(), lr=0.1))
    for op in (hvd.Average, hvd.Adasum):
        with pytest.raises(ValueError, match="wrap it once"):
            hvd.DistributedOptimizer(optimizer, op=op)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_tells_what_it_was_made_with() -> None:
    first, second = given = params()
    second.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(given, lr=0.1), [("a", first), ("b", second)], op=hvd.Sum)
    assert (optimizer.op, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense) == (hvd.Sum, 1.0, False)
    assert (optimizer.process_set, optimizer._parameter_names) == (hvd.global_process_set, {first: "a", second: "b"})
    assert optimizer._requires_update == {first}
    assert optimizer.find_duplicates(["a", "b", "a"]) == {"a"}
    assert isinstance(optimizer, optimizer_module._DistributedOptimizer)


@pytest.mark.usefixtures("alone")
def test_where_a_script_waits_is_its_own_line() -> None:
    handles = HandleManager()
    work: Any = SimpleNamespace(wait=dump_stacks)
    line, stack = handles.synchronize(handles.add(work, tuple))
    assert line.startswith("test_alone.py:"), line
    assert "mpi_ops.py" in stack


def test_shutdown_in_a_signal_handler_does_not_wait_for_the_call_that_it_has_interrupted() -> None:
    handles = HandleManager()

    def interrupted_call() -> None:
        with handles._lock:
            handles.reset()

    thread = threading.Thread(target=interrupted_call, daemon=True)
    thread.start()
    thread.join(CLOSING_S)
    assert not thread.is_alive()


@pytest.mark.usefixtures("alone")
def test_old_arguments_are_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(torch.optim.SGD(params(), lr=0.1), num_groups=1)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        hvd.allreduce(torch.ones(1), average=True)


def test_sets_of_processes_are_for_those_who_have_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS", raising=False)
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.add_process_set([0])
    hvd.init()
    try:
        with pytest.raises(ValueError, match="dynamic"):
            hvd.add_process_set([0])
        with pytest.raises(ValueError, match="not in use"):
            hvd.allreduce(torch.ones(1), process_set=ProcessSet([0]))
        with pytest.raises(ValueError, match="two process sets of the same ranks"):
            hvd.init(process_sets=[ProcessSet([0])])
        hvd.init(process_sets=[hvd.global_process_set])  # after a mistake a second call goes on
    finally:
        hvd.shutdown()
    with pytest.raises(ValueError, match='"dynamic"'):
        hvd.init(process_sets="static")


def test_a_process_set_is_made_of_numbers() -> None:
    unused = ProcessSet(range(3, 0, -1))
    assert (unused.ranks, unused.size(), unused.rank()) == ([1, 2, 3], None, None)
    assert str(unused) == "ProcessSet(process_set_id=None, ranks=[1, 2, 3], mpi_comm=None)"
    with pytest.raises(ValueError, match="whole numbers"):
        ProcessSet(["a"])
    assert process_sets.remove_process_set(unused) is False


def test_init_takes_a_communicator_or_nothing() -> None:
    with pytest.raises(ValueError, match="must be an mpi4py communicator"):
        hvd.init(comm="all")
    assert not hvd.is_initialized()


def test_codes_of_errors_and_ops_are_attributes() -> None:
    basics = HorovodBasics("", "x")
    assert (basics.HOROVOD_PROCESS_SET_ERROR_INIT, basics.HOROVOD_PROCESS_SET_ERROR_EXISTING_SET) == (-1, -6)
    assert (basics.nccl_built(), basics.gloo_built(), basics.cuda_built()) == (0, True, False)


# --- small functions ------------------------------------------------------------------------------------------------


def test_lists_are_split_into_parts_the_first_larger() -> None:
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]


def test_versions_are_compared() -> None:
    assert util.is_version_greater_equal_than("2.13.0+cpu", "1.12.0")
    assert not util.is_version_greater_equal_than("1.9.1", "1.12.0")
    for wrong in [(2, "1.0.0"), ("2.0.0", "1.0")]:
        with pytest.raises(ValueError):
            util.is_version_greater_equal_than(*wrong)  # type: ignore[arg-type]


def test_the_environment_is_changed_for_a_while() -> None:
    os.environ["HVD_TEST_A"] = "old"
    with util.env(HVD_TEST_A="new", HVD_TEST_B="new", HVD_TEST_C=None):
        assert (os.environ["HVD_TEST_A"], os.environ["HVD_TEST_B"]) == ("new", "new")
        assert "HVD_TEST_C" not in os.environ
    assert os.environ.pop("HVD_TEST_A") == "old"
    assert "HVD_TEST_B" not in os.environ


def test_extensions_are_there_or_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match="not part of ronde-horovod yet"):
        util.check_extension("horovod.spark", "HOROVOD_WITH_SPARK", __file__, "mpi_lib")
    monkeypatch.setattr(util, "AVAILABLE", ["missing"])
    with pytest.raises(ImportError, match=r"horovod\.missing needs missing; install it with pip install missing$"):
        util.check_extension("horovod.missing", "HOROVOD_WITH_MISSING", __file__, "mpi_lib")
    assert [util.num_rank_is_power_2(number) for number in (1, 2, 3, 8)] == [True, True, False, True]


@pytest.mark.parametrize(("library", "usable"), [("raise RuntimeError('no library')", False), (MPI, True)])
def test_mpi_is_there_when_mpi4py_finds_its_library(
    library: str, usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass\n__version__ = '4'\n")
    (package / "MPI.py").write_text(library)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    util.mpi_built.cache_clear()
    try:
        assert hvd.mpi_built() is util.mpi_built() is usable
        assert f"[{'X' if usable else ' '}] MPI" in check_build()
    finally:
        util.mpi_built.cache_clear()


def test_exceptions_carry_what_they_carried() -> None:
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync
    error = exceptions.HorovodVersionMismatchError("torch", "1", "2")
    assert (error.name, error.version, error.installed_version) == ("torch", "1", "2")
    assert isinstance(error, ImportError)
    with pytest.raises(exceptions.HorovodVersionMismatchError) as caught:
        util.check_installed_version("pytorch", "1.0", ImportError("x"))
    assert isinstance(caught.value.__cause__, ImportError)
    util.check_installed_version("pytorch", "1.0")


def test_a_thread_in_one_line() -> None:
    done = threading.Event()
    in_thread(done.set).join(5)
    assert done.is_set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_thread(int, ("x",), silent=True).join(5)
    with pytest.raises(ValueError, match="must be a tuple"):
        in_thread(done.set, args=1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_the_functions_on_ranks_can_be_pickled() -> None:
    for function in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size):
        assert cloudpickle.loads(cloudpickle.dumps(function))() == function()
