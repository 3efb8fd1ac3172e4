"""jax.distributed.initialize() without arguments, in a process that `ronde run` has started. Importing ronde.jax is
enough.

JAX finds the coordinator's address in JAX_COORDINATOR_ADDRESS by itself, and asks its classes of cluster environments
for the number of processes and its own. This one reads the variables that `ronde run` sets for JAX. JAX takes the first
one that fits, so it is put in front: in a job of Slurm, Open MPI or Kubernetes, `ronde run` has the last word.
"""

from __future__ import annotations

from jax._src.clusters import ClusterEnv  # the only place

from ronde.comm.launchers import JaxVariables, read_jax_variables


def _read() -> JaxVariables:
    found = read_jax_variables()
    assert found is not None, "JAX asks only if is_env_present()"
    return found


class RondeCluster(ClusterEnv):  # type: ignore[misc]  # JAX is not in the environment of the tools
    """A job of `ronde run`."""

    name = "ronde"

    @classmethod
    def is_env_present(cls) -> bool:
        return read_jax_variables() is not None

    @classmethod
    def get_coordinator_address(
        cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
    ) -> str:
        address = _read().coordinator_address
        if override_coordinator_port:
            return f"{address.rpartition(':')[0]}:{override_coordinator_port}"
        return address

    @classmethod
    def get_process_count(cls) -> int:
        return _read().num_processes

    @classmethod
    def get_process_id(cls) -> int:
        return _read().process_id

    @classmethod
    def get_local_process_id(cls) -> int | None:
        """None: each process has all CPU devices of its own."""
        return None


ClusterEnv._cluster_types.remove(RondeCluster)
ClusterEnv._cluster_types.insert(0, RondeCluster)
