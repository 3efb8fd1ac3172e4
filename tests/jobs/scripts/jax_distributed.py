"""A script for jax.distributed with one line for ronde, and an operation of ronde beside those of JAX."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ronde.jax

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
rows = jax.make_array_from_process_local_data(
    NamedSharding(mesh, PartitionSpec("data")), np.full((1, 2), jax.process_index() + 1.0, np.float32)
)
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
ronde.init()


def reduce_both_ways(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.psum(x, "data"), ronde.jax.allreduce(x)


spec = PartitionSpec("data")
both = jax.jit(jax.shard_map(reduce_both_ways, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False))
by_jax, by_ronde = (np.asarray(each.addressable_data(0)).tolist() for each in both(rows))
alone = np.asarray(jax.jit(ronde.jax.allreduce)(np.ones(1, np.float32))).tolist()
print(f"process {jax.process_index()} of {jax.process_count()}: {float(total)} {by_jax} {by_ronde} {alone}")
