"""Every setting of ronde, declared once, and the reading of the RONDE_* environment variables.

The name of a setting gives its other names: `stall_s` is the argument of init(), `RONDE_STALL_S` the environment
variable, `--stall-s` the flag of `ronde run` and `stall_s` the key in a file. In a rank, an argument of init() wins
over the environment. In `ronde run`, a flag wins over the environment, and the environment over a file; what it has
found is in the environment of its ranks. The coordinator uses the settings of the process that hosts it. A wrong value
raises an error at start that names the setting, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

PREFIX = "RONDE_"
ASSIGNED_BY_LAUNCHER = (
    *("rank", "size", "coordinator", "coordinator_hosted", "key", "host", "address"),
    *("elastic", "worker", "slot", "servers", "server_coordinator"),
)
"""Settings that a launcher gives to each rank. They have no flag and no key in a file."""
FIRST_SERVER = 1_000_000
"""The number of the first server process of a job. Workers have lower ones."""
RESERVED_VARIABLES = ("CALL_FD", "GUARD", "MESSAGE_FDS", "RESULT_FD", "SERVE_TOKEN", "TEST", "TRIAL")
"""RONDE_* variables that begin with these words are no settings: the launcher and the tests use them."""

MAX_TIMEOUT_S = 1_000_000.0
"""Eleven days. From 25 days on, the milliseconds of a socket's timeout overflow."""
MAX_HEARTBEAT_S = 86_400.0
"""The kernel probes a connection four times in this time and waits at most nine hours for one probe."""

MAX_SLOT_BYTES = 1 << 30
CACHE_LINE_BYTES = 64
"""Slots and chunks of shared memory begin at cache lines."""

logger = logging.getLogger("ronde.settings")

_BOOLS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)


class Setting(msgspec.Struct, frozen=True):
    """The declaration of one setting. `ronde run --help` and the reference page show it."""

    help: str
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int = 1
    max_s: float | None = None
    """For a time: the longest one. The shortest is above 0, or 0 when `zero_is_off`."""
    zero_is_off: bool = False
    choices: tuple[str, ...] = ()
    equal_on_all_ranks: bool = False
    """Ranks with different values could not work together: such a job does not start."""
    used_by_coordinator: bool = False
    """The coordinator uses it. Where `ronde run` hosts the coordinator, an argument of init() does not reach it."""
    name: str = ""
    kind: type = str
    default: Any = None

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    def check(self, value: Any) -> None:
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.name} must be at least {self.minimum}, got {value}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.name} must be at most {self.maximum}, got {value}")
        if self.multiple_of > 1 and value % self.multiple_of:
            raise ValueError(f"{self.name} must be a multiple of {self.multiple_of}, got {value}")
        if self.choices and value not in self.choices:
            names = [choice or "empty" for choice in self.choices]
            raise ValueError(f"{self.name} must be {', '.join(names[:-1])} or {names[-1]}, got {value!r}")
        if self.max_s is not None and not (0 < value <= self.max_s or (self.zero_is_off and value == 0)):
            allowed = "from 0 (off) to" if self.zero_is_off else "above 0 and at most"
            raise ValueError(f"{self.name} must be {allowed} {self.max_s:.0f} seconds, got {value}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank finds its round and how the round behaves."""

    rank: Annotated[int, Setting("This process's number in the job, from 0.")] = 0
    size: Annotated[int, Setting("Number of ranks in the job.", minimum=1)] = 1
    coordinator: Annotated[
        str,
        Setting(
            "`address:port` of the coordinator. Needed when size is above 1 and no launcher sets it. With a range of "
            "ports, as in `10.0.0.1:29500-29515`, rank 0 takes the first free one and the others look for it."
        ),
    ] = ""
    coordinator_hosted: Annotated[
        bool,
        Setting("Whether the launcher hosts the coordinator. Otherwise rank 0 hosts it in a thread."),
    ] = False
    key: Annotated[
        str,
        Setting(
            "The job's secret, 64 hexadecimal digits, equal on all ranks. Needed when size is above 1; `ronde run` "
            "makes one, and ranks that another launcher started derive one from a secret in the user's configuration."
        ),
    ] = ""
    host: Annotated[
        str,
        Setting(
            "Name of this rank's host. Ranks with equal names share memory. Empty: a name made from the machine and "
            "its network namespace."
        ),
    ] = ""
    address: Annotated[
        str,
        Setting(
            "The address at which other ranks reach this one. Empty: the one from which it connects to the coordinator."
        ),
    ] = ""
    elastic: Annotated[
        bool,
        Setting(
            "Whether the number of ranks may change while the job runs. Then rank and size are those with which this "
            "process was started, and the coordinator gives it others in each round."
        ),
    ] = False
    worker: Annotated[
        int,
        Setting(
            "In an elastic job, the number of this process among all that the job ever starts. -1: its rank.",
            minimum=-1,
        ),
    ] = -1
    slot: Annotated[
        int,
        Setting(
            "In an elastic job, the number of this process among those of its host when it was started: its "
            "local_rank() until it is in a round. -1: not known.",
            minimum=-1,
        ),
    ] = -1
    servers: Annotated[
        int,
        Setting("How many server processes of parameter servers the launcher has started. 0: ranks are.", minimum=0),
    ] = 0
    server_coordinator: Annotated[
        str, Setting("`address:port` of the coordinator of server processes and workers. Empty: there is none.")
    ] = ""
    backend: Annotated[
        str,
        Setting("Data plane: `native`, or `mpi` (through mpi4py).", choices=("native", "mpi"), equal_on_all_ranks=True),
    ] = "native"
    start_s: Annotated[
        float, Setting("How long init() waits for all members.", max_s=MAX_TIMEOUT_S, used_by_coordinator=True)
    ] = 60.0
    operation_s: Annotated[
        float, Setting("How long one operation may take before it fails on all members.", max_s=MAX_TIMEOUT_S)
    ] = 1800.0
    shutdown_s: Annotated[
        float,
        Setting(
            "How long shutdown() waits for the other ranks to leave.", max_s=MAX_TIMEOUT_S, used_by_coordinator=True
        ),
    ] = 5.0
    stall_s: Annotated[
        float,
        Setting(
            "An operation that waits for members longer than this is reported, with the line where each of them is. 0 "
            "turns reports off.",
            max_s=MAX_TIMEOUT_S,
            zero_is_off=True,
            used_by_coordinator=True,
        ),
    ] = 30.0
    suspend_s: Annotated[
        float,
        Setting(
            "In an elastic job, a rank that others wait for and that has been silent for this long, as a stopped "
            "process is, is left behind.",
            max_s=MAX_TIMEOUT_S,
            used_by_coordinator=True,
        ),
    ] = 30.0
    elastic_timeout_s: Annotated[
        float,
        Setting(
            "In an elastic job, how long a round may wait for enough ranks.",
            max_s=MAX_TIMEOUT_S,
            used_by_coordinator=True,
        ),
    ] = 600.0
    heartbeat_s: Annotated[
        float,
        Setting(
            "A host that cannot be reached for this long is lost.", max_s=MAX_HEARTBEAT_S, used_by_coordinator=True
        ),
    ] = 10.0
    fusion_bytes: Annotated[
        int,
        Setting(
            "The most bytes of named operations that are fused into one call.", minimum=0, used_by_coordinator=True
        ),
    ] = 64 * 1024 * 1024
    slot_bytes: Annotated[
        int,
        Setting(
            "Size of each staging slot of a member in shared memory, at least `chunk_bytes`.",
            maximum=MAX_SLOT_BYTES,
            multiple_of=CACHE_LINE_BYTES,
            equal_on_all_ranks=True,
        ),
    ] = 4 * 1024 * 1024
    chunk_bytes: Annotated[
        int,
        Setting(
            "How much of a slot one step of the shared-memory algorithm uses.",
            minimum=4096,
            multiple_of=CACHE_LINE_BYTES,
            equal_on_all_ranks=True,
        ),
    ] = 256 * 1024
    algorithm: Annotated[
        str,
        Setting(
            "Force one allreduce algorithm: direct, doubling, halving, ring or two_level. Empty: chosen by the size "
            "and by the hosts of the members.",
            choices=("", "direct", "doubling", "halving", "ring", "two_level"),
            equal_on_all_ranks=True,
        ),
    ] = ""
    num_sockets: Annotated[
        int, Setting("TCP connections to the next rank of a ring, per channel.", minimum=1, equal_on_all_ranks=True)
    ] = 2
    compare_at_step: Annotated[
        int,
        Setting(
            "At which step a distributed optimizer compares the parameters of all ranks. 1: the first, before it uses "
            "gradients. 0: never, for ranks that are meant to start with different parameters.",
            minimum=0,
            equal_on_all_ranks=True,
        ),
    ] = 1
    message_buffer_bytes: Annotated[
        int,
        Setting(
            "The most bytes of messages that this rank may have sent to another one, in one group, and that the other "
            "one has not received yet. A send beyond that waits; one message may be larger.",
            minimum=0,
        ),
    ] = 1024 * 1024 * 1024
    jax_ops: Annotated[
        str,
        Setting(
            "How operations run inside of programs of JAX: by `native` handlers, or through `python`, which is slower. "
            "`auto`: native if a self-test finds that they work with the installed JAX.",
            choices=("auto", "native", "python"),
        ),
    ] = "auto"
    mxnet_ops: Annotated[
        str,
        Setting(
            "How asynchronous operations on MXNet arrays run: `native` in MXNet's engine, or through `python`, where "
            "each is waited for. `auto`: native if a self-test finds that it works with the installed MXNet.",
            choices=("auto", "native", "python"),
        ),
    ] = "auto"
    tensorflow_ops: Annotated[
        str,
        Setting(
            "How operations run inside of TensorFlow graphs: by `native` kernels, or through `python`, which is "
            "slower. `auto`: native if a self-test finds that they work with the installed TensorFlow.",
            choices=("auto", "native", "python"),
        ),
    ] = "auto"
    timeline: Annotated[
        str,
        Setting(
            "File for the Chrome trace of all ranks, which the coordinator writes. Empty for none.",
            used_by_coordinator=True,
        ),
    ] = ""
    timeline_events: Annotated[
        int,
        Setting(
            "Most events a timeline holds; later ones are counted, not written.", minimum=1, used_by_coordinator=True
        ),
    ] = 1_000_000

    def __post_init__(self) -> None:
        for setting in describe_settings():
            setting.check(getattr(self, setting.name))
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be from 0 to size - 1 = {self.size - 1}, got {self.rank}")
        if self.slot_bytes < self.chunk_bytes:
            raise ValueError(f"slot_bytes must be at least chunk_bytes ({self.chunk_bytes}), got {self.slot_bytes}")
        if self.key and (len(self.key) != 64 or not set(self.key) <= set("0123456789abcdefABCDEF")):
            raise ValueError("key must be 64 hexadecimal digits (make one with Python's secrets.token_hex(32))")

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return all settings but the key, which is secret."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "key"]

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def replace(self, **changes: Any) -> Settings:
        """Return checked settings in which these differ."""
        return msgspec.structs.replace(self, **changes)

    @classmethod
    def load(
        cls,
        given: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        fallback: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Return the settings of `given` (arguments), over the environment, over `fallback` (a file), over defaults."""
        environ = os.environ if environ is None else environ
        unknown = {*(given or ()), *(fallback or ())} - set(cls.__struct_fields__)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise TypeError(f"unknown setting {names}; `ronde run --help` lists the settings")
        values = dict(fallback or {})
        for setting in describe_settings():
            if setting.env in environ:
                values[setting.name] = parse_setting(setting.name, environ[setting.env], setting.env)
        settings = cls(**{**values, **(given or {})})
        if not settings.coordinator_hosted:  # otherwise a launcher, which has the same variables, has warned already
            for variable in sorted(environ):
                if variable.startswith(PREFIX):
                    _warn_if_unknown(variable)
        return settings

    @classmethod
    def given_names(cls, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> frozenset[str]:
        """Return the names of the settings that an argument or the environment gives."""
        environ = os.environ if environ is None else environ
        return frozenset(info.name for info in describe_settings() if info.name in given or info.env in environ)


def take_secret(variable: str) -> str:
    """Return a secret from the environment, empty if there is none, and remove it there: what this process starts does
    not inherit it."""
    return os.environ.pop(variable, "").strip()


@functools.cache
def describe_settings() -> tuple[Setting, ...]:
    found = []
    for field in msgspec.structs.fields(Settings):
        kind, setting = get_args(field.type)
        found.append(msgspec.structs.replace(setting, name=field.name, kind=kind, default=field.default))
    return tuple(found)


@functools.cache
def _warn_if_unknown(variable: str) -> None:
    """Warn once in a process about a RONDE_* variable that has no effect, because it is probably misspelt."""
    name = variable.removeprefix(PREFIX)
    known = [setting.upper() for setting in Settings.__struct_fields__]
    if name in known or name.startswith(RESERVED_VARIABLES):
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
    logger.warning("%s is no setting of ronde and does nothing%s", variable, hint)


def parse_setting(name: str, text: str, source: str) -> Any:  # the type is the setting's
    """Return the value of a setting from its text. An error calls the setting `source`: a variable or a flag."""
    kind = next(setting.kind for setting in describe_settings() if setting.name == name)
    try:
        return _BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = {bool: "1 or 0", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{source} must be {expected}, got {text!r}") from None


def disable_onnxruntime_telemetry() -> None:
    """Keep ONNX Runtime from sending reports to its makers, unless the user has decided it. Called before its import:
    it looks at its variable then."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def config_dir(environ: Mapping[str, str] | None = None) -> Path:
    return _user_dir("XDG_CONFIG_HOME", ".config", environ)


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    return _user_dir("XDG_CACHE_HOME", ".cache", environ)


def _user_dir(variable: str, default: str, environ: Mapping[str, str] | None) -> Path:
    given = (os.environ if environ is None else environ).get(variable, "")
    return (Path(given) if given.startswith("/") else Path.home() / default) / "ronde"
