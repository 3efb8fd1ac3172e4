"""Small functions that scripts and Horovod's own framework modules take from here."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from horovod.common.exceptions import HorovodVersionMismatchError

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
AVAILABLE = ["tensorflow", "torch", "mxnet"]
"""Frameworks whose module exists here."""
IMPORT_TIMEOUT_S = 20.0
"""Loading a library from a network file system may take long."""

T = TypeVar("T")
_cache = functools.cache  # Horovod's name of it


def get_ext_suffix() -> str:
    """What the file name of a compiled extension ends with."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where a compiled extension would be."""
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())  # noqa: PTH118, PTH120  # a text, as its callers expect


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError when the framework that `ext_name` (such as horovod.torch) is for cannot be used."""
    framework = ext_name.rpartition(".")[2]
    if framework not in AVAILABLE:
        raise ImportError(f"{ext_name} is not part of ronde-horovod yet")
    if importlib.util.find_spec(framework) is None:
        raise ImportError(f"{ext_name} needs {framework}; install it with pip install {framework}")


@functools.cache
def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether `horovod.<ext_base_name>` can be used here."""
    found = ext_base_name in AVAILABLE and importlib.util.find_spec(ext_base_name) is not None
    if verbose:
        warnings.warn(f"horovod.{ext_base_name} is {'' if found else 'not '}available", stacklevel=2)
    return found


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the data plane uses GPUs; it does not."""
    return False


@functools.cache
def mpi_built(verbose: bool = False) -> bool:
    """Whether mpi4py is installed and finds an MPI library. Tried in a process of its own, as loading may crash."""
    from ronde.cli.doctor.system_info import check_component  # a slow import that is rarely needed
    from ronde.types import Deadline

    return importlib.util.find_spec("mpi4py") is not None and (
        check_component("mpi", Deadline(IMPORT_TIMEOUT_S)).state == "usable"
    )


def gloo_built(verbose: bool = False) -> bool:
    """Always true: ronde's own data plane, which replaces Gloo, needs no MPI."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as a number; 0 without."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """IBM DDL: never."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Intel oneCCL: never."""
    return False


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment within the context; those that are None are left alone."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """A function of `op` and the old argument `average` that gives the op which is meant."""

    def meant(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError("give op or average, not both; average is the old name, op=hvd.Average or hvd.Sum")
        if average is not None:
            warnings.warn("average is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
            return int(reduce_ops.Average if average else reduce_ops.Sum)
        return int(reduce_ops.Average) if op is None else op

    return meant


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether it is 1, 2, 4, 8 …"""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[list[T]]:  # noqa: E741  # Horovod's name, may be given by keyword
    """n parts of nearly equal length, the longer ones first."""
    base, more = divmod(len(l), n)
    starts = [i * base + min(i, more) for i in range(n + 1)]
    return [list(l[start:end]) for start, end in itertools.pairwise(starts)]


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """There is nothing to compare: ronde works with every version of a framework. With an exception given, which says
    that something did not work, it becomes the reason of a HorovodVersionMismatchError."""
    if exception is not None:
        raise HorovodVersionMismatchError(name, version, version) from exception


def is_iterable(x: object) -> bool:
    return hasattr(x, "__iter__")


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is at least x.y.z."""
    from packaging import version

    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are texts, got {ver!r} and {target!r}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"the version to compare with must be x.y.z, got {target!r}")
    return version.parse(ver) >= version.parse(target)
