"""Parameters and Python objects on all ranks: copied from one rank, compared, or averaged. All of it is called outside
of jit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.training.agreement import check_equal
from ronde.training.metrics import weighted_means, weighted_values
from ronde.training.sync_check import checksum, compare_checksums


def broadcast_parameters(tree: Any, root: int = 0, *, group: Group | None = None) -> Any:
    """Return the tree of the root, a rank of the world: parameters, the state of an optimizer, a model of Equinox.
    Collective.

    Arrays of JAX and NumPy, keys of random generators, and numbers are those of the root; other leaves, such as
    functions, are this rank's own. If the trees differ in structure, dtypes or shapes, Mismatch names the first
    difference.
    """
    members = resolve_group(group)
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    arrays = {index: array_of(leaf) for index, leaf in enumerate(leaves) if is_array(leaf)}
    described = [
        f"{jax.tree_util.keystr(path)} {arrays[index].dtype}{list(arrays[index].shape)}"
        for index, (path, _) in enumerate(paths)
        if index in arrays
    ]
    check_equal(members, "broadcast_parameters", described)
    numbers = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, bool | int | float | complex)}
    if members.size == 1:
        return tree
    leaves = list(leaves)
    if arrays:
        sent = np.concatenate([bytes_of(array) for array in arrays.values()])
        received, position = members.broadcast(sent, root=root), 0
        for index, array in arrays.items():
            taken = received[position : position + array.nbytes].view(array.dtype).reshape(array.shape)
            position += array.nbytes
            leaves[index] = leaf_like(leaves[index], taken)
    for index, number in objects.broadcast(numbers, root, group=members).items():
        leaves[index] = number
    return jax.tree.unflatten(structure, leaves)


def check_in_sync(tree: Any, *, group: Group | None = None) -> None:
    """Compare the arrays of a tree across ranks, bit by bit; collective. OutOfSync names the first that differs, and
    the ranks that differ from the others."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    checksums = [
        (jax.tree_util.keystr(path), checksum(bytes_of(array_of(leaf)))) for path, leaf in paths if is_array(leaf)
    ]
    compare_checksums(resolve_group(group), checksums)


def broadcast_object(obj: Any, root: int = 0, *, group: Group | None = None) -> Any:  # any object
    """Return the object of the root, a rank of the world. What the other ranks pass is ignored."""
    return objects.broadcast(obj, root, group=group)


def allgather_object(obj: Any, *, group: Group | None = None) -> list[Any]:
    """Return the objects of all members, in their order."""
    return objects.allgather(obj, group=group)


def average_metrics(
    values: Mapping[str, Any], *, count: float | Mapping[str, float] = 1.0, group: Group | None = None
) -> dict[str, float]:
    """Return the means over all ranks, weighted by `count`, the number of samples that this rank's values stand for.

    `values` are numbers or arrays of one number by name. Every rank calls it, even one without a sample: with count=0
    its values do not count, and `values` may be empty. A metric without any sample is NaN. Every rank gets the same
    numbers.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"average_metrics takes values by name, such as {{'loss': loss}}, got a {type(values).__name__}"
        )
    mine = weighted_values({name: np.asarray(value) for name, value in values.items()}, count)
    return weighted_means(objects.allgather(mine, group=group))


# --- leaves as arrays ------------------------------------------------------------------------------------------------


def is_array(leaf: object) -> bool:
    """Whether a leaf of a tree is an array of JAX or NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def array_of(leaf: Any) -> Array:
    """The numbers of such a leaf. Those of a key of a random generator are its data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def leaf_like(leaf: Any, array: Array) -> Any:
    """These numbers as a leaf of the same kind, in memory of its own and on the same devices."""
    if not isinstance(leaf, jax.Array):
        return np.array(array) if isinstance(leaf, np.ndarray) else array[()]
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(leaf))
    placed = jax.device_put(np.array(array), leaf.sharding)
    return placed.astype(leaf.dtype) if placed.dtype != leaf.dtype else placed


def bytes_of(array: Array) -> Array:
    """The bytes of an array, as a flat array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
