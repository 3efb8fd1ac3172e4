"""Names, handles, errors, process sets, join, rounds and the timeline."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from torch.testing import assert_close as same

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.torch import mpi_ops
from tests.compat.checks.registry import check, raises


@check
def the_environment_tells_the_place_before_init() -> None:
    assert get_env_rank_and_size() == (hvd.rank(), hvd.size())
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    told = [int(os.environ[f"HOROVOD_{name}"]) for name in names]
    assert told == [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    assert os.environ["HOROVOD_HOSTNAME"] == "localhost"
    assert hvd.is_master() == (hvd.rank() == 0)
    assert hvd.mpi_ops.is_homogeneous()
    assert (hvd.gloo_enabled(), hvd.mpi_enabled()) == (True, False)


@check
def names_may_come_in_any_order() -> None:
    names = ["a", "b", "c"]
    order = names if hvd.rank() else names[::-1]
    handles = {name: hvd.allreduce_async(torch.full((2,), float(ord(name))), name=name) for name in order}
    for name in names:
        same(hvd.synchronize(handles[name]), torch.full((2,), float(ord(name))))


@check
def a_handle_is_for_one_synchronize() -> None:
    handle = hvd.allreduce_async(torch.ones(2))
    assert isinstance(handle, int)
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    with raises(ValueError, "was not created"):
        hvd.poll(handle)
    assert hvd.allreduce_async(torch.ones(2)) == handle + 1


@check
def a_name_under_way_cannot_be_used_again() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
        with raises(ValueError, "still under way"):
            hvd.allreduce_async(torch.ones(2), name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
    hvd.synchronize(handle)


@check
def what_ranks_disagree_on_is_an_internal_error_everywhere() -> None:
    rank = hvd.rank()
    with raises(HorovodInternalError, "disagree on shape"):
        hvd.allreduce(torch.ones(2 + rank), name="shape")
    with raises(HorovodInternalError, "disagree on dtype"):
        hvd.allreduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32), name="dtype")
    with raises(HorovodInternalError, "disagree on op"):
        hvd.allreduce(torch.ones(2), name="op", op=hvd.Sum if rank else hvd.Max)
    with raises(HorovodInternalError, "disagree on root"):
        hvd.broadcast(torch.ones(2), root_rank=rank, name="root")
    with raises(HorovodInternalError, "disagree on shape"):
        hvd.allgather(torch.ones(2, 2 + rank), name="rows")
    scalar = torch.tensor(1.0)
    for collective in (hvd.allgather, hvd.allgather_async, hvd.reducescatter, hvd.reducescatter_async):
        with raises(HorovodInternalError, "at least 1 dimension"):
            collective(scalar, name="scalar")
    for grouped in (hvd.grouped_allgather, hvd.grouped_allgather_async, hvd.grouped_reducescatter):
        with raises(HorovodInternalError, "at least 1 dimension"):
            grouped([torch.ones(1), scalar], name="scalars")
    with raises(HorovodInternalError):
        hvd.reducescatter(torch.ones(4), op=hvd.Max)


@check
def the_callers_own_mistakes_are_value_errors() -> None:
    with raises(ValueError):
        hvd.alltoall(torch.ones(4), splits=torch.tensor([1, 1]))  # int64
    with raises(ValueError):
        hvd.alltoall(torch.ones(4), splits=[9, 9])
    with raises(ValueError):
        hvd.broadcast(torch.ones(2), root_rank=99)
    with raises(ValueError, "complex"):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64))
    with raises(ValueError, "not both"):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)


@check
def process_sets_come_and_go() -> None:
    mine = hvd.add_process_set([hvd.size() - 1])
    both = [mine.process_set_id, *mpi_ops._basics._get_process_set_ids_and_ranks()[mine.process_set_id or 0]]
    assert both == [1, hvd.size() - 1]
    if mine.included():
        for op in (hvd.Sum, hvd.Adasum):
            same(hvd.allreduce(torch.ones(2), op=op, process_set=mine), torch.ones(2))
        assert (mine.rank(), mine.size()) == (0, 1)
        assert hvd.broadcast_object("x", root_rank=hvd.size() - 1, process_set=mine) == "x"
    else:
        with raises(ValueError):
            hvd.allreduce(torch.ones(2), process_set=mine)
        with raises(ValueError, "not a member"):
            mine.rank()
    with raises(ValueError, "already"):
        hvd.add_process_set([hvd.size() - 1])
    with raises(ValueError, "cannot have"):
        hvd.add_process_set([hvd.size()])
    assert hvd.remove_process_set(mine)
    assert not hvd.remove_process_set(mine)
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set(hvd.ProcessSet([0]))
    assert again.process_set_id == 1, "a free number is used again"
    assert hvd.remove_process_set(again)


@check
def who_has_joined_gives_zeros_until_all_have() -> None:
    hvd.barrier()
    if hvd.rank() == 0:
        last = hvd.join()
    else:
        same(hvd.allreduce(torch.full((3,), 4.0), name="alone"), torch.full((3,), 4.0 / hvd.size()))
        with raises(HorovodInternalError, "join"):
            hvd.allgather(torch.ones(2), name="not with the joined")
        last = hvd.join()
    assert last == hvd.size() - 1
    assert hvd.allgather_object(last) == [last] * hvd.size()


@check
def a_timeline_can_be_started_and_stopped() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("first.json", "second.json")]
        for path, marks in zip(paths, (True, False), strict=True):
            hvd.start_timeline(str(path), mark_cycles=marks)
            hvd.barrier()
            hvd.allreduce(torch.ones(3), name="of the timeline")
            hvd.barrier()
            hvd.stop_timeline()
        hvd.allreduce(torch.ones(3), name="behind it")
        if hvd.rank() == 0:
            traces = [json.loads(path.read_text()) for path in paths]
            names = [{event["name"] for event in trace["traceEvents"]} for trace in traces]
            assert all({"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "allreduce.of the timeline"} <= each for each in names), (
                names
            )
            assert ["CYCLE_START" in each for each in names] == [True, False]
            assert {event["pid"] for event in traces[0]["traceEvents"]} == set(range(hvd.size()))
            assert "behind it" not in paths[1].read_text()
            assert traces[0]["otherData"]["start_time_since_epoch_in_micros"] > 1_700_000_000_000_000
            with raises(ValueError, "cannot be written"):
                hvd.start_timeline(f"{folder}/no/such/file.json")
        hvd.stop_timeline()  # there is none


@check
def a_new_round_begins_after_shutdown() -> None:
    before = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(before)
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with raises(ValueError, "hvd.init()"):
        hvd.rank()
    with raises(HorovodInternalError, "hvd.init()"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    assert hvd.allreduce_async(torch.ones(1)) == 1, "numbers begin anew"
    assert mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [*range(hvd.size())], 1: [0]}
    assert hvd.remove_process_set(first)


@check
def every_rank_begins_with_the_same_process_sets() -> None:
    me = hvd.rank()
    hvd.barrier()
    hvd.shutdown()
    one, other = hvd.ProcessSet([0]), hvd.ProcessSet([1])
    with raises(ValueError, "rank 0 gave [[0], [1]] and rank 1 gave [[0]]"):
        hvd.init(process_sets=[one] if me else [one, other])
    with raises(ValueError, "rank 0 gave [[0]] and rank 1 gave [[1]]"):
        hvd.init(process_sets=[other] if me else [one])
    with raises(ValueError, "cannot have rank 9" if me else "rank 1 gave hvd.init() process sets that cannot be"):
        hvd.init(process_sets=[hvd.ProcessSet([9]) if me else one])
    assert mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [*range(hvd.size())]}
    hvd.init(process_sets=[one, other])  # after a mistake a second call goes on
    assert (one.process_set_id, other.process_set_id) == (1, 2)
    assert hvd.remove_process_set(other)
    assert hvd.remove_process_set(one)
