"""x"""

from ronde.jax.collectives import allgather, allreduce, alltoall, barrier, broadcast, reduce_scatter
from ronde.training.graph_errors import find_error
