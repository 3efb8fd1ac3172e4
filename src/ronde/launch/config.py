"""From flags, environment and a YAML file to a Job: flags are stronger than the environment, the environment than the
file, the file than defaults. Used by `ronde run` and `ronde doctor`.

launch_options() lists everything that `ronde run` can be asked for, each option once with its flag, its key in a file,
its kind and its meaning; every setting that a user may choose is one of them. A file's keys are the flags with
underscores, and `command`; a job file has them in its section `run`, beside the sections of other commands.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from ronde.coordinator.round_planning import ElasticLimits
from ronde.launch.job import Job, SshOptions, load_settings, make_elastic_limits, working_directory
from ronde.launch.placement import Host, format_host, parse_hosts, place_ranks, read_hostfile
from ronde.settings import ASSIGNED_BY_LAUNCHER, describe_settings, parse_setting

OptionKind: TypeAlias = Literal["whole", "seconds", "range", "text", "hosts", "choice", "switch", "many", "setting"]
"""A "range" is two numbers of seconds, the first not above the second."""

SectionOptions = TypeVar("SectionOptions", bound=msgspec.Struct)

RANKS, ELASTIC = "Ranks and hosts", "A number of ranks that changes, and restarts"
REMOTE, RANK_ENV = "Other hosts", "What ranks get"
OUTPUT, WATCHING, SETTINGS = "Output", "Watching and ending", "Settings of ronde itself"


@dataclass(frozen=True, slots=True)
class LaunchOption:
    name: str
    """The key in a file; the flag is the same with dashes."""
    kind: OptionKind
    group: str
    help: str
    metavar: str = ""
    flags: tuple[str, ...] = ()
    """Shorter flags."""
    minimum: float = 0

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def all_flags(self) -> tuple[str, ...]:
        return (*self.flags, self.flag)


_RUN_OPTIONS = (
    LaunchOption(
        "num_ranks", "whole", RANKS, "Number of ranks. Default: all slots of the hosts, or 1.", "", ("-np", "-n"), 1
    ),
    LaunchOption("hosts", "hosts", RANKS, "Hosts and their slots, as in host1:2,host2:4.", "HOST:SLOTS,…", ("-H",)),
    LaunchOption("hostfile", "text", RANKS, "File of hosts, one per line: `host`, `host:4` or `host slots=4`.", "FILE"),
    LaunchOption(
        "servers",
        "text",
        RANKS,
        "Start so many server processes for parameter servers (ronde.ps) beside the ranks; `in-ranks`: ranks are the "
        "servers. With --tf-config they are those of TensorFlow's ParameterServerStrategy. Default: all slots of hosts "
        "that are written as host:2+servers, or in-ranks.",
        "N|in-ranks",
    ),
    LaunchOption("config", "text", RANKS, "YAML file; its keys are these flags, with underscores.", "FILE"),
    LaunchOption(
        "min_np",
        "whole",
        ELASTIC,
        "The job goes on with so many ranks when others are lost, and others may join it. Default with --max-np or "
        "--discover: as many as -np.",
        minimum=1,
    ),
    LaunchOption(
        "max_np", "whole", ELASTIC, "The most ranks that join. Default: as many as it starts with.", minimum=1
    ),
    LaunchOption(
        "discover",
        "text",
        ELASTIC,
        "Command that prints the hosts which the job may use, one per line: `host` or `host:4`. It is run again and "
        "again, and so is a hostfile read again when --min-np is given.",
        "COMMAND",
    ),
    LaunchOption(
        "slots_per_host",
        "whole",
        ELASTIC,
        "Slots of a host that --discover or --hostfile names without a number. Default: 1.",
        minimum=1,
    ),
    LaunchOption("reset_limit", "whole", ELASTIC, "End the job when ranks were lost more often than so many times."),
    LaunchOption(
        "cooldown",
        "range",
        ELASTIC,
        "For how long a slot or host that has failed is left alone: the first time, and at most. Default: 1 60.",
        "SECONDS",
    ),
    LaunchOption(
        "restarts",
        "whole",
        ELASTIC,
        "Start a job whose number of ranks is fixed again after a failure, at most so many times.",
    ),
    LaunchOption("ssh_port", "whole", REMOTE, "Port of the hosts' ssh servers.", "PORT", minimum=1),
    LaunchOption("ssh_identity", "text", REMOTE, "File of the private key for ssh.", "FILE"),
    LaunchOption(
        "ssh_option", "many", REMOTE, "Option for ssh, as in StrictHostKeyChecking=no. Repeatable.", "NAME=VALUE"
    ),
    LaunchOption(
        "ssh_start_s", "seconds", REMOTE, "How long a host may take to answer. Default: 20.", "SECONDS", minimum=0.1
    ),
    LaunchOption(
        "python", "text", REMOTE, "Python that has ronde, on the other hosts. Default: the path of this one.", "PATH"
    ),
    LaunchOption(
        "env",
        "many",
        RANK_ENV,
        "Variable for every rank. Repeatable; without a value: as it is here.",
        "NAME[=VALUE]",
        ("-x",),
    ),
    LaunchOption("cwd", "text", RANK_ENV, "Working directory of every rank. Default: this one.", "DIR"),
    LaunchOption(
        "bind", "choice", RANK_ENV, "With `core`, bind each rank to cores of its own. Default: none.", "none|core"
    ),
    LaunchOption(
        "tf_config",
        "switch",
        RANK_ENV,
        "Give every rank a TF_CONFIG, for TensorFlow's own strategies, unless you have set one. Default: yes, in jobs "
        "of 2 to 1024 ranks whose number is fixed.",
    ),
    LaunchOption("no_tf_config", "switch", RANK_ENV, "Give no rank a TF_CONFIG."),
    LaunchOption(
        "dmlc",
        "switch",
        RANK_ENV,
        "Start a scheduler and servers for MXNet's own distributed kvstore beside the ranks, which are its workers.",
    ),
    LaunchOption(
        "dmlc_servers", "whole", RANK_ENV, "Number of servers with --dmlc. Default: as many as ranks.", minimum=1
    ),
    LaunchOption("output", "text", OUTPUT, "Also write what each rank prints to files in this directory.", "DIR"),
    LaunchOption("no_fold", "switch", OUTPUT, "Show equal lines of several ranks one by one."),
    LaunchOption("timestamps", "switch", OUTPUT, "Begin each line with the time."),
    LaunchOption("no_color", "switch", OUTPUT, "No colours."),
    LaunchOption(
        "top", "switch", WATCHING, "Show a live table of the ranks, as `ronde top`, instead of what they print."
    ),
    LaunchOption("name", "text", WATCHING, "Name of the job, for `ronde top` and `ronde stack`.", "NAME"),
    LaunchOption("debug", "whole", WATCHING, "Give this rank the terminal; nobody times out.", "RANK"),
    LaunchOption(
        "grace",
        "seconds",
        WATCHING,
        "After a failure, the others get so long to end by themselves. Default: 10.",
        "SECONDS",
    ),
    LaunchOption("terminate", "seconds", WATCHING, "Between SIGTERM and SIGKILL. Default: 5.", "SECONDS"),
)


_SHORT_SETTING_FLAGS = {"elastic_timeout_s": ("--elastic-timeout",)}
_HOST_OPTIONS = ("hosts", "hostfile", "discover")
_TF_CONFIG_OPTIONS = ("tf_config", "no_tf_config")
_ELASTIC_OPTIONS = ("min_np", "max_np", "discover")
"""Each of them makes a job elastic."""


@functools.cache
def launch_options() -> tuple[LaunchOption, ...]:
    options = [*_RUN_OPTIONS]
    for setting in describe_settings():
        if setting.name not in ASSIGNED_BY_LAUNCHER:
            text = setting.help + ("" if setting.default in ("", None) else f" Default: {setting.default}.")
            metavar = {bool: "1|0", int: "N", float: "SECONDS"}.get(type(setting.default), "TEXT")
            short = _SHORT_SETTING_FLAGS.get(setting.name, ())
            options.append(LaunchOption(setting.name, "setting", SETTINGS, text, metavar, short))
    return tuple(options)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """A job, and how to show it."""

    job: Job
    output_dir: str
    """Directory for files with the output of each rank; empty for none."""
    fold: bool
    timestamps: bool
    color: bool
    """If the output is a terminal."""
    top: bool
    discover: str = ""
    """Command that prints the hosts of an elastic job."""
    watched_hostfile: str = ""
    """Hostfile of an elastic job."""
    slots_per_host: int = 1
    """Of hosts that one of them names without slots."""


def make_launch_config(
    flags: Mapping[str, Any], command: Sequence[str], environ: Mapping[str, str] | None = None
) -> LaunchConfig:
    """Combine these flags (only those that were given, as texts) with the file that they may name. ValueError says in
    one line what is wrong."""
    environ = os.environ if environ is None else environ
    known = {option.name: option for option in launch_options()}
    given = {
        name: _check(known[name], value, "/".join(known[name].all_flags), is_flag=True) for name, value in flags.items()
    }
    file = read_config(given["config"]) if "config" in given else {}
    for names in (_HOST_OPTIONS, _TF_CONFIG_OPTIONS):
        if set(names) & given.keys():  # these replace those of the file
            file = {name: value for name, value in file.items() if name not in names}
    values = {
        **file,
        **given,
        "env": (*file.get("env", ()), *((text, "-x") for text in given.get("env", ()))),  # of two, the last counts
        "ssh_option": (*given.get("ssh_option", ()), *file.get("ssh_option", ())),  # of two, ssh takes the first
        "command": tuple(command) or file.get("command", ()),
    }
    if not command and any("{best." in word for word in values["command"]):
        raise ValueError(
            f"{given['config']}: the command has {{best.…}}, which `ronde workflow` replaces by what the search has "
            "found; use that, or give a command: ronde run --config job.yaml -- python train.py --lr 0.1"
        )
    given_settings, file_settings = (
        {
            option.name: found[option.name]
            for option in launch_options()
            if option.kind == "setting" and option.name in found
        }
        for found in (given, file)
    )
    is_elastic = any(name in values for name in _ELASTIC_OPTIONS)
    values["settings"] = load_settings(given_settings, environ, file_settings, is_elastic=is_elastic)
    return LaunchConfig(
        job=_make_job(values, environ),
        output_dir=values.get("output", ""),
        fold=not values.get("no_fold", False),
        timestamps=values.get("timestamps", False),
        color=not (values.get("no_color", False) or environ.get("NO_COLOR") or environ.get("TERM") == "dumb"),
        top=values.get("top", False),
        discover=values.get("discover", ""),
        watched_hostfile=values.get("hostfile", "") if is_elastic else "",
        slots_per_host=values.get("slots_per_host", 1),
    )


class HostOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On which hosts the processes of a command run, and how these are reached: keys of its section, which mean what
    they mean for `ronde run`."""

    hosts: Any = None
    """As in host1:2,host2:4. Default: this machine."""
    hostfile: str = ""
    """File of hosts, instead of `hosts`."""
    ssh_port: int | None = None
    ssh_identity: str = ""
    """File of the private key for ssh."""
    ssh_option: tuple[str, ...] = ()
    """As in StrictHostKeyChecking=no."""
    ssh_start_s: float | None = None
    """How long a host may take to answer."""
    python: str = ""
    """Python that has ronde, on the other hosts. Default: the path of this one."""
    env: dict[str, Any] | tuple[str, ...] = ()
    """Variables for the processes, as NAME=VALUE."""


HOST_OPTIONS = HostOptions.__struct_fields__
"""Names of launch options that every command with processes of its own has."""


def host_flags(options: HostOptions, job_file: str = "") -> dict[str, Any]:
    """The flags for make_launch_config() that these options stand for. How hosts are reached, and variables, may also
    be in the section `run` of the job file; which hosts may not. ValueError names a wrong key."""
    run = read_config(job_file) if job_file else {}
    known: dict[str, Any] = {
        name: run[name] for name in ("ssh_port", "ssh_identity", "ssh_start_s", "python") if name in run
    }
    own = {name: value for name in HOST_OPTIONS if (value := getattr(options, name)) not in (None, "", ())}
    flags: dict[str, Any] = {**known, **own}
    own_env = own.get("env", ())
    own_env = _read_key("env", "env", own_env) if isinstance(own_env, dict) else own_env
    flags["env"] = [*(text for text, _ in run.get("env", ())), *own_env]  # of two, the last counts
    flags["ssh_option"] = [*own.get("ssh_option", ()), *run.get("ssh_option", ())]  # of two, ssh takes the first
    return {name: value for name, value in flags.items() if value != []}


_SSH_FIELDS = {"ssh_port": "port", "ssh_identity": "identity", "ssh_start_s": "start_s", "ssh_option": "options"}
_JOB_FIELDS = {
    **{name: name for name in ("command", "python", "settings", "bind", "name")},
    **{"debug": "debug_rank", "grace": "grace_s", "terminate": "terminate_s"},
    **{"cooldown": "cooldown_s", "restarts": "restarts"},
}


def _make_job(values: Mapping[str, Any], environ: Mapping[str, str]) -> Job:
    if not values["command"]:
        raise ValueError("there is no command to run; give one, as in: ronde run -np 2 python train.py")
    named = [name for name in _HOST_OPTIONS if name in values]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other: give one of them")
    hosts = values.get("hosts", ())
    if "hostfile" in values:
        hosts = read_hostfile(values["hostfile"], default_slots=values.get("slots_per_host", 1))
    num_slots = sum(host.slots for host in hosts if not host.for_servers)
    num_ranks = values.get("num_ranks") or num_slots or values.get("min_np") or 1
    cwd = Path(values.get("cwd", ""))
    job = Job(
        num_ranks=num_ranks,
        hosts=hosts,
        limits=_make_limits(values, hosts, num_ranks),
        ssh=SshOptions(**{field: values[name] for name, field in _SSH_FIELDS.items() if name in values}),
        env=_parse_variables(values["env"], environ),
        tf_config=_choose_tf_config(values),
        dmlc_servers=_choose_dmlc_servers(values, num_ranks),
        servers=_choose_servers(values, hosts),
        cwd=str(cwd if cwd.is_absolute() else Path(working_directory(), cwd)),
        **{field: values[name] for name, field in _JOB_FIELDS.items() if name in values},
    )
    if job.debug_rank is not None and job.debug_rank >= job.num_ranks:
        raise ValueError(f"--debug {job.debug_rank}: there are only ranks 0 to {job.num_ranks - 1}")
    if job.debug_rank is not None and values.get("top"):
        raise ValueError("--debug and --top both want the terminal: give one of them")
    return job


def _make_limits(values: Mapping[str, Any], hosts: Sequence[Host], num_ranks: int) -> ElasticLimits | None:
    """Return the limits of an elastic job; None when the number of ranks is fixed."""
    if not any(name in values for name in _ELASTIC_OPTIONS):
        for name in ("reset_limit", "cooldown"):
            if name in values:
                raise ValueError(f"{name} is for jobs whose number of ranks changes: give min_np, too")
        return None
    if "hosts" in values:
        place_ranks(hosts, num_ranks)  # these hosts never change: there have to be enough slots
    chosen = {name: values.get(name) for name in ("min_np", "max_np", "reset_limit")}
    return make_elastic_limits(values["settings"], num_ranks, **chosen)


def _choose_tf_config(values: Mapping[str, Any]) -> bool | None:
    """Return whether ranks get a TF_CONFIG; None when that is left to the job."""
    wanted = values.get("tf_config")
    if not values.get("no_tf_config"):
        return wanted
    if wanted:
        raise ValueError("tf_config and no_tf_config exclude each other: give one of them")
    return False


def _choose_dmlc_servers(values: Mapping[str, Any], num_ranks: int) -> int | None:
    """Return how many servers of MXNet's kvstore there are; None if it is not wanted."""
    servers: int | None = values.get("dmlc_servers")
    if not values.get("dmlc"):
        if servers is not None:
            raise ValueError("dmlc_servers is for jobs with a kvstore of MXNet: give dmlc, too")
        return None
    return num_ranks if servers is None else servers


def _choose_servers(values: Mapping[str, Any], hosts: Sequence[Host]) -> int | None:
    """Return how many server processes there are; None if nothing is said about it."""
    text = values.get("servers")
    if text is None:
        return sum(host.slots for host in hosts if host.for_servers) or None
    if text == "in-ranks":
        return 0
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"servers must be a whole number of at least 1, or in-ranks; got {text!r}")
    return int(text)


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


# --- the file ----------------------------------------------------------------------------------------------------


def read_config(path: str) -> dict[str, Any]:
    """Return the checked values of a YAML file. ValueError names the file and the key."""
    found, lines = _load_yaml(path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold keys and values, as in `num_ranks: 4`, got a {type(found).__name__}")
    section = ""
    if not found.keys().isdisjoint(JOB_SECTIONS):
        section, found = "run", _choose_section(path, "run", found, lines)
    values = {
        name: _read_key(path, name, value, lines.get((section, str(name))))
        for name, value in found.items()
        if value is not None
    }
    if "env" in values:
        variables = []
        for text in values["env"]:
            line = lines.get(("env", text)) or lines.get(("env", text.partition("=")[0]))
            variables.append((text, f"{path}, line {line}: env:" if line else f"{path}: env:"))  # an anchor has no line
        values["env"] = tuple(variables)
    return values


JOB_SECTIONS = ("run", "data", "search", "export", "predict", "serve")
"""The sections of a job file, one for each command. `run` has what a file with only the keys of `ronde run` has."""


def read_sections(path: str) -> dict[str, dict[Any, Any]]:
    """Return the sections of a job file with their values, unchecked. ValueError if it is no job file."""
    found, lines = _load_yaml(path)
    if not isinstance(found, dict) or found.keys().isdisjoint(JOB_SECTIONS):
        raise ValueError(f"{path} is no job file: it has none of the sections {', '.join(JOB_SECTIONS)}")
    return {section: _choose_section(path, section, found, lines) for section in found}


def read_section(path: str, section: str, kind: type[SectionOptions]) -> SectionOptions:
    """Return the section of a job file. `kind` is a struct that forbids unknown fields. ValueError names the file, the
    key and its line."""
    found, lines = _load_yaml(path)
    if not isinstance(found, dict) or section not in found:
        raise ValueError(f"{path} has no section `{section}:`")
    values = _choose_section(path, section, found, lines)
    known = kind.__struct_fields__
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            line = lines.get((section, str(name)))
            raise ValueError(f"{path}, line {line}: unknown key {str(name)!r} in the section {section!r}; {advice}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        name = next((name for name in values if f"$.{name}" in str(error)), "")
        where = f", line {lines[section, str(name)]}" if (section, str(name)) in lines else ""
        raise ValueError(f"{path}{where}: {section}: {explain_wrong_value(kind, values, error)}") from None


def explain_wrong_value(kind: type[msgspec.Struct], values: Mapping[Any, Any], error: msgspec.ValidationError) -> str:
    """Say what msgspec has found wrong in the values of such a struct; where few values are allowed, which ones."""
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]  # of a struct
        value = values.get(field.name, field.default)
        if isinstance(field.type, msgspec.inspect.LiteralType) and value not in field.type.values:
            return f"{field.name} must be one of {', '.join(map(str, field.type.values))}, got {value!r}"
    return str(error)


def _choose_section(
    path: str, section: str, found: Mapping[Any, Any], lines: Mapping[tuple[str, str], int]
) -> dict[Any, Any]:
    for name in found:
        if name not in JOB_SECTIONS:
            line = lines.get(("", str(name)))
            raise ValueError(f"{path}, line {line}: unknown section {str(name)!r}; there are {', '.join(JOB_SECTIONS)}")
    values = found.get(section)
    if not isinstance(values, dict | None):
        raise ValueError(f"{path}: the section {section!r} must hold keys and values, got {values!r}")
    return {name: value for name, value in (values or {}).items() if value is not None}


def _load_yaml(path: str) -> tuple[object, dict[tuple[str, str], int]]:
    """Return the value of the file, in which no key may stand twice in one place (YAML itself would take the last), and
    the line of each entry of each option or section."""
    import yaml  # slow; needed only for a file

    lines: dict[tuple[str, str], int] = {}
    twice = ""
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        for option, node in [("", root), *((str(key.value), node) for key, node in _yaml_entries(root))]:
            for key, _ in _yaml_entries(node):
                lines[option, str(key.value)] = key.start_mark.line + 1
        twice = _find_twice(root, set())
        found = None if root is None or twice else loader.construct_document(root)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = ", ".join(text for text in (error.problem, error.context) if text)
        raise ValueError(f"{path}{where} is no YAML: {problem}; is it indented as the lines around it?") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if twice:
        raise ValueError(f"{path}, {twice}")
    return found, lines


def _find_twice(node: Any, seen: set[int]) -> str:  # a node of YAML, or None
    """Return the line of the first key that stands twice in one place, at any depth; empty if there is none."""
    if node is None or id(node) in seen or node.id == "scalar":  # an anchor may be in many places
        return ""
    seen.add(id(node))
    keys = set()
    for key, _ in node.value if node.id == "mapping" else []:
        if key.id == "scalar" and (key.tag, key.value) in keys:
            return f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice"
        keys.add((key.tag, str(key.value)))
    children = [child for _, child in node.value] if node.id == "mapping" else node.value
    return next((found for child in children if (found := _find_twice(child, seen))), "")


def _yaml_entries(node: Any) -> list[tuple[Any, Any]]:  # nodes of YAML, or None
    """Return keys with their values, the entries of a list, or the value itself."""
    if node is None or node.id == "mapping":
        return [] if node is None else node.value
    return [(entry, None) for entry in (node.value if node.id == "sequence" else [node])]


def _read_key(path: str, name: object, value: object, line: int | None = None) -> Any:  # its kind's
    path = path if line is None else f"{path}, line {line}"
    source = f"{path}: {name}"
    if name == "command":
        try:
            words = shlex.split(value) if isinstance(value, str) else value
        except ValueError as error:  # a quotation that does not end
            raise ValueError(f"{source}: {error} in {value!r}") from None
        if not isinstance(words, list):
            raise ValueError(f"{source} must be a text or a list of words, got {value!r}")
        return tuple(str(_single_value(word, f"{source}: a word")) for word in words)
    known = {option.name: option for option in launch_options() if option.name != "config"}
    if name in ASSIGNED_BY_LAUNCHER:
        raise ValueError(f"{source} is not to be chosen: `ronde run` gives it to every rank")
    if name not in known:
        near = difflib.get_close_matches(str(name), [*known, "command"], n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else "`ronde run --help` shows all flags"
        raise ValueError(f"{path}: unknown key {str(name)!r}; {advice}")
    if name == "env" and isinstance(value, dict):
        value = [
            str(key) if text is None else f"{key}={_format_plain(_single_value(text, f'{source}: {key}'))}"
            for key, text in value.items()
        ]
    return _check(known[str(name)], value, source)


# --- values ------------------------------------------------------------------------------------------------------


def _check(option: LaunchOption, value: object, source: str, *, is_flag: bool = False) -> Any:  # as its kind says
    """Return the value of an option as its kind wants it. ValueError begins with the source."""
    match option.kind:
        case "whole" | "seconds":
            kind, noun = (int, "whole number") if option.kind == "whole" else (float, "number of seconds")
            try:
                if is_flag and isinstance(value, str):
                    value = kind(value)
                value = number = msgspec.convert(value, kind)
            except ValueError:
                number = math.nan
            if not option.minimum <= number < math.inf:
                raise ValueError(f"{source} must be a {noun} of at least {option.minimum:g}, got {value!r}")
            return number
        case "range":
            words = value if isinstance(value, list | tuple) else [value]
            seconds = [_check(replace(option, kind="seconds"), each, source, is_flag=is_flag) for each in words]
            if len(seconds) != 2 or seconds[0] > seconds[1]:
                raise ValueError(f"{source} must be two numbers of seconds, the longest last, got {value!r}")
            return tuple(seconds)
        case "text":
            return _check_text(value, source)
        case "many":
            return tuple(_check_text(each, source) for each in (value if isinstance(value, list) else [value]))
        case "choice":
            choices = option.metavar.split("|")
            if value not in choices:
                raise ValueError(f"{source} must be {' or '.join(choices)}, got {value!r}")
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


def _single_value(value: object, source: str) -> object:
    """Return the value, which may be neither missing nor several."""
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"{source} must be one value, got {'nothing' if value is None else repr(value)}")
    return value


def _format_plain(value: object) -> str:
    """Write a value as a shell would: YAML's yes and no are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)
