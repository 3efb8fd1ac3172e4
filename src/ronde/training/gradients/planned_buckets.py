"""The buckets of a list of dense gradients, planned without an exchange between ranks. Used by frameworks whose steps
name all gradients at once: TensorFlow's graphs and MXNet's trainers.

A *plan* is the list of buckets of one place in a program, in their order. What the members have to agree on travels
with every bucket as a hash, so different plans are an error that names them. Names of parameters may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ronde.comm.call import MAX_DESCRIPTION_BYTES, CallOptions, Signature, get_signature, hash_signature
from ronde.text import shorten
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.bucket_assignment import GradientBucket, assign_buckets, choose_size_limits
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.types import DType, OperationKind, parse_op

SMALL_PLAN_BYTES = 4_000_000
"""Gradients of so many bytes at most share a bucket. Reducing them takes less than a millisecond, and each further one
wakes two threads of every rank and lets them wait for the other ranks, while the backward pass needs the core."""


class GradientLayout(NamedTuple):
    """Which of the gradients there are: the members have to agree on it."""

    kinds: str
    """A letter for each gradient: dense, slices or none."""
    missing: str
    """In words, what is None. Its names may differ between the members."""


class PlannedBucket(NamedTuple):
    """One bucket of a plan: which gradients are in it, and what the members have to agree on."""

    indices: tuple[int, ...]
    signature: Signature
    num_elements: int


def plan_buckets(
    parameters: Sequence[ParameterInfo],
    names: Sequence[str],
    plan: str,
    layout: GradientLayout,
    settings: GradientSettings,
    factors: tuple[float, float] | None = None,
) -> tuple[PlannedBucket, ...]:
    """The buckets of dense gradients, in the order in which they are reduced: equal on all ranks whose parameters and
    settings are. settings.together uses `names`, not those of the parameters. `factors` before and after the reduction
    are 1 / settings.predivide and its inverse unless given."""
    total_bytes = sum(each.count * DType[each.dtype.upper()].num_bytes for each in parameters)
    overlap = settings.overlap is not False and total_bytes > SMALL_PLAN_BYTES
    limits = choose_size_limits(total_bytes, settings.bucket_mb, overlap=overlap)
    named = [msgspec.structs.replace(each, name=name) for each, name in zip(parameters, names, strict=True)]
    buckets = assign_buckets(named, (), limits, settings.together)
    agreed_settings = {name: text for name, text in settings.describe().items() if name != "together"}  # of this rank
    agreed = [plan, layout.kinds, agreed_settings, [each.indices for each in buckets], *map(str, parameters)]
    digest = hash_signature(repr(agreed))
    options = CallOptions(parse_op(settings.op), *(factors or (1.0 / settings.predivide, settings.predivide)))
    return tuple(
        _make_bucket(number, bucket, len(buckets), parameters, layout, options, digest)
        for number, bucket in enumerate(buckets)
    )


def _make_bucket(
    number: int,
    bucket: GradientBucket,
    num_buckets: int,
    parameters: Sequence[ParameterInfo],
    layout: GradientLayout,
    options: CallOptions,
    digest: int,
) -> PlannedBucket:
    shapes = tuple(parameters[index].shape for index in bucket.indices)
    signature = get_signature(OperationKind.ALLREDUCE, DType[bucket.dtype.upper()], shapes, options)
    hash = hash_signature(f"{signature.description} {signature.hash} {number} {num_buckets} {digest}")
    first, num_elements = parameters[bucket.indices[0]], sum(parameters[index].count for index in bucket.indices)
    more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    text = (
        f"bucket {number} of {num_buckets}{layout.missing}: {signature.op.name.lower()} of {num_elements} "
        f"{bucket.dtype} in {shorten(first.name, 40)!r}{list(first.shape)}{more}"
    )
    description = f"{shorten(text, MAX_DESCRIPTION_BYTES - 20)} #{hash:016x}"
    named = msgspec.structs.replace(signature, label="bucket", description=description, hash=hash)
    return PlannedBucket(bucket.indices, named, num_elements)
