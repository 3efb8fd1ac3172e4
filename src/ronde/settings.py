"""Every setting, in one place: its default, its environment name, its meaning. Reads the environment for all others.

Strength: argument of init() or flag of `ronde run` > environment > file > default. Wrong values fail at start, naming
the field.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import logging
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

__all__ = [
    "ASSIGNED_BY_LAUNCHER",
    "PREFIX",
    "SettingInfo",
    "Settings",
    "config_dir",
    "describe_settings",
    "parse_setting",
]

PREFIX = "RONDE_"
ASSIGNED_BY_LAUNCHER = ("rank", "size", "coordinator", "coordinator_hosted", "key", "host", "address")
"""Settings that tell a rank its place: whoever starts a job gives them to its ranks, nobody chooses them."""
RESERVED_VARIABLES = ("CALL_FD", "GUARD", "RESULT_FD", "TEST")
"""Beginnings of names that the launcher and our own tests use for other things."""

MAX_TIMEOUT_S = 1_000_000.0
"""Eleven days. From 25 on, the milliseconds of a socket's timeout overflow."""
MAX_HEARTBEAT_S = 86_400.0
"""A connection is probed four times in it, and the kernel waits nine hours for a probe at most."""

logger = logging.getLogger("ronde.settings")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a rank finds its round and how the round behaves."""

    rank: int = 0
    """This process's number in the job, from 0."""

    size: int = 1
    """Number of ranks in the job."""

    coordinator: str = ""
    """`address:port` of the coordinator; needed when size is above 1 and no launcher tells. With a range of ports, as
    in `10.0.0.1:29500-29515`, rank 0 takes the first free one and the others look for it."""

    coordinator_hosted: bool = False
    """Whether somebody else (the launcher) hosts the coordinator. Otherwise rank 0 does, in a thread."""

    key: str = ""
    """The job's secret, 64 hexadecimal digits, equal on all ranks. Needed when size is above 1; `ronde run` makes one,
    and ranks that another launcher started derive one from a secret in the user's configuration."""

    host: str = ""
    """Name of this rank's host. Ranks with equal names share memory; the default tells hosts and network
    namespaces apart by itself."""

    address: str = ""
    """Where other ranks reach this one. Empty: at the address from which it talks to the coordinator."""

    backend: str = "native"
    """Data plane: `native`, or `mpi` (through mpi4py)."""

    start_s: float = 60.0
    """How long init() waits for all members."""

    operation_s: float = 1800.0
    """How long one operation may take before it fails on all members."""

    shutdown_s: float = 5.0
    """How long shutdown() waits for the others to say goodbye."""

    stall_s: float = 30.0
    """An operation that waits for members longer than this is reported, with what those members are doing. 0 turns
    the watch off."""

    heartbeat_s: float = 10.0
    """A host that cannot be reached for so long is lost."""

    fusion_bytes: int = 64 * 1024 * 1024
    """Most bytes of named operations that travel as one."""

    slot_bytes: int = 4 * 1024 * 1024
    """Staging room in shared memory per member and slot."""

    chunk_bytes: int = 256 * 1024
    """How much of a slot one step of the shared-memory algorithm uses."""

    algorithm: str = ""
    """Force one allreduce algorithm: direct, doubling, ring or two_level. Empty: chosen by size and places."""

    num_sockets: int = 2
    """TCP connections per pair of neighbours and channel."""

    timeline: str = ""
    """File for the Chrome trace of all ranks; written by the coordinator. Empty for none."""

    timeline_events: int = 1_000_000
    """Most events a timeline holds; later ones are counted, not written."""

    def __post_init__(self) -> None:
        """Check every field at once, so that a wrong value fails here and by name."""
        _check_at_least("size", self.size, 1)
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be from 0 to size - 1 = {self.size - 1}, got {self.rank}")
        if self.backend not in ("native", "mpi"):
            raise ValueError(f"backend must be native or mpi, got {self.backend!r}")
        if self.algorithm not in ("", "direct", "doubling", "ring", "two_level"):
            raise ValueError(f"algorithm must be empty, direct, doubling, ring or two_level, got {self.algorithm!r}")
        for name in ("start_s", "operation_s", "shutdown_s"):
            _check_seconds(name, getattr(self, name), MAX_TIMEOUT_S)
        _check_seconds("heartbeat_s", self.heartbeat_s, MAX_HEARTBEAT_S)
        if not 0 <= self.stall_s <= MAX_TIMEOUT_S:
            raise ValueError(f"stall_s must be from 0 (off) to {MAX_TIMEOUT_S:.0f} seconds, got {self.stall_s}")
        _check_at_least("fusion_bytes", self.fusion_bytes, 0)
        _check_at_least("chunk_bytes", self.chunk_bytes, 4096)
        _check_at_least("slot_bytes", self.slot_bytes, self.chunk_bytes)
        _check_at_least("num_sockets", self.num_sockets, 1)
        _check_at_least("timeline_events", self.timeline_events, 1)
        if self.key and (len(self.key) != 64 or not set(self.key) <= set("0123456789abcdefABCDEF")):
            raise ValueError("key must be 64 hexadecimal digits (make one with ronde.net.keys.new_job_key())")

    def __repr__(self) -> str:
        """All fields, the key hidden."""
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.name != "key")
        return f"Settings({', '.join(shown)})"

    @classmethod
    def load(
        cls,
        given: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        fallback: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Settings from arguments over the environment over what is known otherwise (a file) over the defaults."""
        environ = os.environ if environ is None else environ
        unknown = {*(given or ()), *(fallback or ())} - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise TypeError(
                f"unknown setting {', '.join(sorted(unknown))}; ronde.settings.describe_settings() lists all"
            )
        values = dict(fallback or {})
        for field in dataclasses.fields(cls):
            variable = PREFIX + field.name.upper()
            if variable in environ:
                values[field.name] = parse_setting(field.name, environ[variable], variable)
        settings = cls(**{**values, **(given or {})})
        if not settings.coordinator_hosted:  # of a launcher, which has its ranks' environment and has told already
            for variable in sorted(environ):
                if variable.startswith(PREFIX):
                    _warn_if_unknown(variable)
        return settings

    @classmethod
    def given_names(cls, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> frozenset[str]:
        """The names of the settings that an argument or the environment gives."""
        environ = os.environ if environ is None else environ
        return frozenset(
            f.name for f in dataclasses.fields(cls) if f.name in given or PREFIX + f.name.upper() in environ
        )


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def _check_seconds(name: str, value: float, maximum: float) -> None:
    if not 0 < value <= maximum:
        raise ValueError(f"{name} must be above 0 and at most {maximum:.0f} seconds, got {value}")


@functools.cache
def _warn_if_unknown(variable: str) -> None:
    """A variable that is misspelt does nothing; that is told once in a process."""
    name = variable.removeprefix(PREFIX)
    known = [field.name.upper() for field in dataclasses.fields(Settings)]
    if name in known or name.startswith(RESERVED_VARIABLES):
        return
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {PREFIX}{near[0]}?" if near else ""
    logger.warning("%s is no setting of ronde and does nothing%s", variable, meant)


def parse_setting(name: str, text: str, source: str) -> Any:  # the type is the field's
    """The value of a setting from its text. `source` is what an error calls it: a variable, a flag."""
    return _parse(source, text, _field_types()[name])


@functools.cache
def _field_types() -> dict[str, type]:
    return get_type_hints(Settings)


def _parse(name: str, text: str, kind: type) -> Any:  # the type is the field's
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise ValueError(f"{name} must be 1 or 0, got {text!r}")
    try:
        return kind(text)
    except ValueError:
        words = {int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{name} must be {words}, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as the reference page shows it."""

    name: str
    env: str
    default: object
    help: str


def describe_settings() -> list[SettingInfo]:
    """All settings with the text written below each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Settings)))
    body = tree.body[0].body  # type: ignore[attr-defined]  # a class has a body
    helps: dict[str, str] = {}
    for before, after in itertools.pairwise(body):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(before.target, ast.Name)
            helps[before.target.id] = " ".join(str(after.value.value).split())
    return [
        SettingInfo(f.name, PREFIX + f.name.upper(), f.default, helps[f.name]) for f in dataclasses.fields(Settings)
    ]


def config_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where the user's configuration of ronde is."""
    environ = os.environ if environ is None else environ
    given = environ.get("XDG_CONFIG_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".config") / "ronde"
