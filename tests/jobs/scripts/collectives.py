"""Every public function that moves data, for ranks of several tests. Needs nothing but ronde and NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import ronde


def use_every_collective(counts: Sequence[int] = (5, 1000)) -> None:
    """Arrays of so many elements, in program order, by name and planned; all of it right. At the end one rank after the
    other joins."""
    rank, size = ronde.rank(), ronde.size()
    everybody = range(size)
    total = size * (size + 1) / 2
    for count in counts:
        x = np.full(count, rank + 1.0, np.float32)
        for name in (None, "a", "b", "a"):
            assert (ronde.allreduce(x, name=name) == total).all()
        assert (ronde.allreduce(x, name="mean", op="mean") == total / size).all()
        few = x[:1000]
        works = [ronde.allreduce(few * index, name=f"many {index}", wait=False) for index in range(5)]
        assert all((work.wait() == total * index).all() for index, work in enumerate(works))
        assert ronde.allreduce([few, few], op="max")[1][0] == size
        assert (ronde.broadcast(x, root=size - 1) == size).all()
        assert ronde.allgather(few)[:: len(few)].tolist() == [*range(1, size + 1)]
        assert ronde.reduce_scatter(np.ones((size, count), np.float32)).tolist() == [[size] * count]
    assert (ronde.reduce_scatter(np.ones((size + 1, 3))) == size).all()
    assert ronde.allgather(np.arange(rank)).tolist() == [n for other in everybody for n in range(other)]
    rows, splits = ronde.alltoall(np.full(size, rank))
    assert rows.tolist() == list(everybody) and splits.tolist() == [1] * size
    assert ronde.objects.broadcast({"rank": rank}, root=1) == {"rank": 1}
    assert ronde.objects.allgather("x" * rank) == ["x" * other for other in everybody]
    got = np.empty(3)
    sent = ronde.send(np.full(3, float(rank)), (rank + 1) % size, wait=False)
    assert (ronde.receive(got, (rank - 1) % size) == (rank - 1) % size).all()
    sent.wait()
    group = ronde.add_group([0, size - 1])
    if group.included:
        assert group.allreduce(np.ones(2), name="a").tolist() == group.allreduce(np.ones(2)).tolist() == [2, 2]
    ronde.remove_group(group)
    with ronde.plan([ronde.Bucket(count=max(counts)), ronde.Bucket(count=10, op="sum")]) as plan:
        plan.arrays[0][:] = rank + 1
        assert (plan.run(0) == total / size).all()
        plan.start(1).wait()
    ronde.barrier(name="end")
    for _ in range(rank):
        ronde.allreduce(np.ones(3))
    assert ronde.join() == size - 1
