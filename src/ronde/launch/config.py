"""From flags, environment and a YAML file to a Job: flags are stronger than the environment, the environment than the
file, the file than defaults. Used by `ronde run` and `ronde doctor`.

launch_options() lists everything that `ronde run` can be asked for, each option once with its flag, its key in a file,
its kind and its meaning; every setting that a user may choose is one of them. A file's keys are the flags with
underscores, and `command`:

    num_ranks: 6
    hosts: {host1: 2, host2: 4}
    env: {OMP_NUM_THREADS: 4}
    stall_s: 60
    command: python train.py
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from ronde.launch.job import Job, SshOptions, working_directory
from ronde.launch.placement import Host, format_host, parse_hosts, read_hostfile
from ronde.settings import ASSIGNED_BY_LAUNCHER, PREFIX, Settings, describe_settings, parse_setting

OptionKind: TypeAlias = Literal["whole", "seconds", "text", "hosts", "choice", "switch", "many", "setting"]

RANKS, REMOTE, ENVIRONMENT = "Ranks and hosts", "Other hosts", "What ranks get"
OUTPUT, WATCHING, SETTINGS = "Output", "Watching and ending", "Settings of ronde itself"


@dataclass(frozen=True, slots=True)
class LaunchOption:
    name: str
    """The key in a file; the flag is the same with dashes."""
    kind: OptionKind
    group: str
    help: str
    flags: tuple[str, ...] = ()
    """Shorter flags."""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = 0

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def all_flags(self) -> tuple[str, ...]:
        return (*self.flags, self.flag)


def _default(kind: type[Job] | type[SshOptions], name: str) -> str:
    return f"Default: {next(field.default for field in fields(kind) if field.name == name):g}."


_RUN_OPTIONS = (
    LaunchOption(
        "num_ranks", "whole", RANKS, "Number of ranks. Default: all slots of the hosts, or 1.", ("-np", "-n"), minimum=1
    ),
    LaunchOption("hosts", "hosts", RANKS, "Hosts and their slots, as in host1:2,host2:4.", ("-H",), "HOST:SLOTS,…"),
    LaunchOption(
        "hostfile", "text", RANKS, "File of hosts, one per line: `host`, `host:4` or `host slots=4`.", (), "FILE"
    ),
    LaunchOption("config", "text", RANKS, "YAML file; its keys are these flags, with underscores.", (), "FILE"),
    LaunchOption("ssh_port", "whole", REMOTE, "Port of the hosts' ssh servers.", (), "PORT", minimum=1),
    LaunchOption("ssh_identity", "text", REMOTE, "File of the private key for ssh.", (), "FILE"),
    LaunchOption(
        "ssh_option", "many", REMOTE, "Option for ssh, as in StrictHostKeyChecking=no. Repeatable.", (), "NAME=VALUE"
    ),
    LaunchOption(
        "ssh_start_s",
        "seconds",
        REMOTE,
        f"How long a host may take to answer. {_default(SshOptions, 'start_s')}",
        (),
        "SECONDS",
        minimum=0.1,
    ),
    LaunchOption(
        "python",
        "text",
        REMOTE,
        "Python that has ronde, on the other hosts. Default: the path of this one.",
        (),
        "PATH",
    ),
    LaunchOption(
        "env",
        "many",
        ENVIRONMENT,
        "Variable for every rank. Repeatable; without a value: as it is here.",
        ("-x",),
        "NAME[=VALUE]",
    ),
    LaunchOption("cwd", "text", ENVIRONMENT, "Working directory of every rank. Default: this one.", (), "DIR"),
    LaunchOption(
        "bind",
        "choice",
        ENVIRONMENT,
        "With `core`, bind each rank to cores of its own. Default: none.",
        (),
        "none|core",
        ("none", "core"),
    ),
    LaunchOption("tf_config", "switch", ENVIRONMENT, "Give every rank a TF_CONFIG, for TensorFlow's own strategies."),
    LaunchOption("output", "text", OUTPUT, "Also write what each rank prints to files in this directory.", (), "DIR"),
    LaunchOption("no_fold", "switch", OUTPUT, "Show equal lines of several ranks one by one."),
    LaunchOption("timestamps", "switch", OUTPUT, "Begin each line with the time."),
    LaunchOption("no_color", "switch", OUTPUT, "No colours."),
    LaunchOption(
        "top", "switch", WATCHING, "Show a live table of the ranks, as `ronde top`, instead of what they print."
    ),
    LaunchOption("name", "text", WATCHING, "Name of the job, for `ronde top` and `ronde stack`.", (), "NAME"),
    LaunchOption("debug", "whole", WATCHING, "Give this rank the terminal; nobody times out.", (), "RANK"),
    LaunchOption(
        "grace",
        "seconds",
        WATCHING,
        f"After a failure, the others get so long to end by themselves. {_default(Job, 'grace_s')}",
        (),
        "SECONDS",
    ),
    LaunchOption(
        "terminate", "seconds", WATCHING, f"Between SIGTERM and SIGKILL. {_default(Job, 'terminate_s')}", (), "SECONDS"
    ),
)


@functools.cache
def launch_options() -> tuple[LaunchOption, ...]:
    return (*_RUN_OPTIONS, *_setting_options())


def _setting_options() -> Iterable[LaunchOption]:
    for setting in describe_settings():
        if setting.name not in ASSIGNED_BY_LAUNCHER:
            shown = "" if setting.default in ("", None) else f" Default: {setting.default}."
            yield LaunchOption(setting.name, "setting", SETTINGS, setting.help + shown, (), _metavar(setting.default))


def _metavar(default: object) -> str:
    if isinstance(default, bool):
        return "1|0"
    return {int: "N", float: "SECONDS"}.get(type(default), "TEXT")


EXAMPLE = "ronde run -np 2 python train.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """A job, and how to show it."""

    job: Job
    output_dir: str = ""
    """Directory for files with the output of each rank; empty for none."""
    fold: bool = True
    timestamps: bool = False
    color: bool = True
    """If the output is a terminal."""
    top: bool = False


def make_launch_config(
    flags: Mapping[str, Any], command: Sequence[str], environ: Mapping[str, str] | None = None
) -> LaunchConfig:
    """Combine these flags (only those that were given, as texts) with the file that they may name. ValueError says in
    one line what is wrong."""
    environ = os.environ if environ is None else environ
    known = {option.name: option for option in launch_options()}
    given = {
        name: _check(known[name], _parse_number(known[name], value), "/".join(known[name].all_flags))
        for name, value in flags.items()
    }
    file = read_config(given["config"]) if "config" in given else {}
    if {"hosts", "hostfile"} & given.keys():  # these replace the hosts of the file
        file = {name: value for name, value in file.items() if name not in ("hosts", "hostfile")}
    values = _merge(file, given)
    command = tuple(command) or file.get("command", ())
    if not command:
        raise ValueError(f"there is no command to run; give one, as in: {EXAMPLE}")
    return LaunchConfig(
        job=_make_job(values, command, _load_settings(file, given, environ), environ),
        output_dir=values.get("output", ""),
        fold=not values.get("no_fold", False),
        timestamps=values.get("timestamps", False),
        color=not (values.get("no_color", False) or environ.get("NO_COLOR") or environ.get("TERM") == "dumb"),
        top=values.get("top", False),
    )


def _merge(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags are stronger than the file; where an option may have several values, all count."""
    return {
        **file,
        **given,
        "env": (*file.get("env", ()), *((text, "-x") for text in given.get("env", ()))),  # of two, the last counts
        "ssh_option": (*given.get("ssh_option", ()), *file.get("ssh_option", ())),  # of two, ssh takes the first
    }


def read_config(path: str) -> dict[str, Any]:
    """Return the checked values of a YAML file. ValueError names the file and the key."""
    found, env_lines = _load_yaml(path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold keys and values, as in `num_ranks: 4`, got a {type(found).__name__}")
    known = {option.name: option for option in launch_options() if option.name != "config"}
    values = {name: _read_key(path, name, value, known) for name, value in found.items() if value is not None}
    if "env" in values:
        values["env"] = tuple((text, _env_source(path, text, env_lines)) for text in values["env"])
    return values


def _env_source(path: str, text: str, env_lines: Mapping[str, int]) -> str:
    """Say where a file sets this variable (NAME or NAME=VALUE); what YAML took from an anchor has no line."""
    line = env_lines.get(text) or env_lines.get(text.partition("=")[0])
    return f"{path}, line {line}: env:" if line else f"{path}: env:"


def _load_yaml(path: str) -> tuple[object, dict[str, int]]:
    """Return the value of the file, in which no key may stand twice (YAML itself would take the last), and the line of
    each entry of `env`."""
    import yaml  # slow; needed only for a file

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        twice = _find_duplicate_key(root)
        found = None if root is None or twice else loader.construct_document(root)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if twice:
        raise ValueError(f"{path}, {twice}")
    return found, _find_env_lines(root)


def _find_env_lines(root: Any) -> dict[str, int]:  # a node of YAML, or None
    env = next((value for key, value in _mapping_items(root) if key.value == "env"), None)
    if env is None:
        return {}
    entries = [key for key, _ in _mapping_items(env)] or (env.value if env.id == "sequence" else [env])
    return {str(entry.value): entry.start_mark.line + 1 for entry in entries}


def _find_duplicate_key(root: Any) -> str:  # a node of YAML, or None
    """Return the line and the key, among the keys of the file and of their values: no option is nested deeper."""
    for node in (root, *(value for _, value in _mapping_items(root))):
        seen = set()
        for key, _ in _mapping_items(node):
            if str(key.value) in seen:
                return f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice"
            seen.add(str(key.value))
    return ""


def _mapping_items(node: Any) -> list[tuple[Any, Any]]:  # a node of YAML, or None
    return node.value if node is not None and node.id == "mapping" else []


def _read_key(path: str, name: object, value: object, known: Mapping[str, LaunchOption]) -> Any:  # its kind's
    source = f"{path}: {name}"
    if name == "command":
        return _read_command(value, source)
    if name not in known:
        raise ValueError(f"{path}: {_describe_unknown_key(str(name), [*known, 'command'])}")
    if name == "env" and isinstance(value, dict):
        value = [_format_variable(key, text, f"{source}: {key}") for key, text in value.items()]
    return _check(known[str(name)], value, source)


def _read_command(value: object, source: str) -> tuple[str, ...]:
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:  # a quotation that does not end
        raise ValueError(f"{source}: {error} in {value!r}") from None
    if not isinstance(words, list):
        raise ValueError(f"{source} must be a text or a list of words, got {value!r}")
    return tuple(str(_single_value(word, f"{source}: a word")) for word in words)


def _format_variable(name: object, value: object, source: str) -> str:
    """Write a variable as the flag -x takes it: NAME=VALUE, or NAME alone."""
    return str(name) if value is None else f"{name}={_format_plain(_single_value(value, source))}"


def _describe_unknown_key(name: str, known: Sequence[str]) -> str:
    if name in ASSIGNED_BY_LAUNCHER:
        return f"{name} is not to be chosen: `ronde run` gives it to every rank"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown key {name!r}; " + (f"did you mean {near[0]!r}?" if near else "`ronde run --help` shows all flags")


def _check(option: LaunchOption, value: object, source: str) -> Any:  # as its kind says
    """Return the value of an option as its kind wants it. ValueError begins with the source."""
    match option.kind:
        case "whole":
            if not isinstance(value, int) or isinstance(value, bool) or value < option.minimum:
                raise ValueError(f"{source} must be a whole number of at least {option.minimum:g}, got {value!r}")
            return value
        case "seconds":
            number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
            if not option.minimum <= number < math.inf:
                raise ValueError(f"{source} must be a number of seconds of at least {option.minimum:g}, got {value!r}")
            return float(number)
        case "text":
            return _check_text(value, source)
        case "many":
            return tuple(_check_text(each, source) for each in (value if isinstance(value, list | tuple) else [value]))
        case "choice":
            if value not in option.choices:
                raise ValueError(f"{source} must be {' or '.join(option.choices)}, got {value!r}")
            return value
        case "switch":
            if not isinstance(value, bool):
                raise ValueError(f"{source} must be true or false, got {value!r}")
            return value
        case "hosts":  # as for -H, or a list of such texts, or hosts with their slots
            try:
                listed = value if isinstance(value, list) else [value]
                return parse_hosts(",".join(text for each in listed for text in _host_texts(each)))
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None
        case "setting":
            return parse_setting(option.name, str(_single_value(value, source)), source)


def _check_text(value: object, source: str) -> str:
    if isinstance(value, dict | list) or not _format_plain(value):
        raise ValueError(f"{source} must be a text, got {value!r}")
    return _format_plain(value)


def _host_texts(value: object) -> list[str]:
    if not isinstance(value, dict):
        return [str(_single_value(value, "a host"))]
    return [format_host(str(name), str(_single_value(slots, f"host {name}: slots"))) for name, slots in value.items()]


def _parse_number(option: LaunchOption, value: object) -> object:
    """Convert a number of the command line; _check refuses what is none."""
    kind = {"whole": int, "seconds": float}.get(option.kind)
    try:
        return kind(value) if kind is not None and isinstance(value, str) else value
    except ValueError:
        return value


def _single_value(value: object, source: str) -> object:
    """Return the value, which may be neither missing nor several."""
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"{source} must be one value, got {'nothing' if value is None else repr(value)}")
    return value


def _format_plain(value: object) -> str:
    """Write a value as a shell would: YAML's yes and no are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _load_settings(file: Mapping[str, Any], given: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    names = [option.name for option in launch_options() if option.kind == "setting"]
    # Variables of an outer job, if this process is a rank of one.
    outer_job_variables = {PREFIX + name.upper() for name in ASSIGNED_BY_LAUNCHER}
    return Settings.load(
        {name: given[name] for name in names if name in given},
        {name: text for name, text in environ.items() if name not in outer_job_variables},
        {name: file[name] for name in names if name in file},
    )


def _make_job(
    values: Mapping[str, Any], command: tuple[str, ...], settings: Settings, environ: Mapping[str, str]
) -> Job:
    hosts = _choose_hosts(values)
    num_ranks = values.get("num_ranks") or sum(host.slots for host in hosts) or 1
    job = Job(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        ssh=SshOptions(options=values["ssh_option"], **_given(values, _SSH_FIELDS)),
        env=_parse_variables(values["env"], environ),
        cwd=_absolute_path(values.get("cwd", "")),
        settings=settings,
        **_given(values, _JOB_FIELDS),
    )
    if job.debug_rank is not None and job.debug_rank >= num_ranks:
        raise ValueError(f"--debug {job.debug_rank}: there are only ranks 0 to {num_ranks - 1}")
    if job.debug_rank is not None and values.get("top"):
        raise ValueError("--debug and --top both want the terminal: give one of them")
    return job


_SSH_FIELDS = {"ssh_port": "port", "ssh_identity": "identity", "ssh_start_s": "start_s"}
_JOB_FIELDS = {
    **{name: name for name in ("python", "tf_config", "bind", "name")},
    **{"debug": "debug_rank", "grace": "grace_s", "terminate": "terminate_s"},
}


def _given(values: Mapping[str, Any], fields_of: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that were given, by the names of the fields that take them."""
    return {field: values[name] for name, field in fields_of.items() if name in values}


def _choose_hosts(values: Mapping[str, Any]) -> tuple[Host, ...]:
    if "hosts" in values and "hostfile" in values:
        raise ValueError("hosts and hostfile exclude each other: give one of them")
    if "hosts" in values:
        return cast("tuple[Host, ...]", values["hosts"])
    return read_hostfile(values["hostfile"]) if "hostfile" in values else ()


def _absolute_path(path: str) -> str:
    return str(Path(path) if Path(path).is_absolute() else Path(working_directory(), path))


def _parse_variables(entries: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse entries NAME=VALUE or NAME, each with the place where it was written; of two, the last counts."""
    variables = {}
    for text, source in entries:
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise ValueError(f"{source} {text!r}: a variable is NAME=VALUE, or NAME for its value here")
        if not equals and name not in environ:
            raise ValueError(f"{source} {name}: there is no such variable here; give it a value, as in {name}=1")
        variables[name] = value if equals else environ[name]
    return variables
