"""From what a user asked for to a Job: flags over the environment over a YAML file over defaults. Used by `ronde run`.

A file's keys are the flags with underscores, and `command`:

    num_ranks: 6
    hosts: {host1: 2, host2: 4}
    env: {OMP_NUM_THREADS: 4}
    stall_s: 60
    command: python train.py
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.launch.hosts import parse_hosts, read_hostfile
from ronde.launch.job import Host, Job, Ssh
from ronde.launch.options import Option, options
from ronde.launch.placement import place
from ronde.settings import OF_THE_JOB, PREFIX, Settings, parse_setting

__all__ = ["Request", "make_request", "read_config"]

EXAMPLE = "ronde run -np 2 python train.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `ronde run` was asked for: a job, and how to show it."""

    job: Job
    output: str = ""
    """Directory for what ranks print; empty for none."""
    fold: bool = True
    timestamps: bool = False
    color: bool = True
    """Where there is a terminal."""
    top: bool = False


def make_request(flags: Mapping[str, Any], command: Sequence[str], environ: Mapping[str, str] | None = None) -> Request:
    """The request of these flags (only those that were given, as texts) and the file that they may name. ValueError
    says in one line what is wrong."""
    environ = os.environ if environ is None else environ
    known = {option.name: option for option in options()}
    given = {
        name: _check(known[name], _from_text(known[name], value), known[name].flag) for name, value in flags.items()
    }
    file = read_config(given["config"]) if "config" in given else {}
    if {"hosts", "hostfile"} & given.keys():  # said anew: what the file says about hosts is over
        file = {name: value for name, value in file.items() if name not in ("hosts", "hostfile")}
    told = {**file, **given}
    command = tuple(command) or file.get("command", ())
    if not command:
        raise ValueError(f"there is no command to run; give one, as in: {EXAMPLE}")
    return Request(
        job=_make_job(told, command, _load_settings(file, given, environ), environ),
        output=told.get("output", ""),
        fold=not told.get("no_fold", False),
        timestamps=told.get("timestamps", False),
        color=not (told.get("no_color", False) or environ.get("NO_COLOR") or environ.get("TERM") == "dumb"),
        top=told.get("top", False),
    )


def read_config(path: str) -> dict[str, Any]:
    """The checked values of a YAML file. ValueError names the file and the key."""
    import yaml  # only who has a file waits for it

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold keys and values, as in `num_ranks: 4`, got a {type(found).__name__}")
    known = {option.name: option for option in options() if option.name != "config"}
    return {name: _read_key(path, name, value, known) for name, value in found.items() if value is not None}


def _read_key(path: str, name: object, value: object, known: Mapping[str, Option]) -> Any:  # noqa: ANN401  # its kind's
    source = f"{path}: {name}"
    if name == "command":
        words = shlex.split(value) if isinstance(value, str) else value
        if not isinstance(words, list):
            raise ValueError(f"{source} must be a text or a list of words, got {value!r}")
        return tuple(str(word) for word in words)
    if name not in known:
        raise ValueError(f"{path}: {_unknown(str(name), [*known, 'command'])}")
    if name == "hosts" and isinstance(value, dict):
        value = ",".join(f"{host}:{slots}" for host, slots in value.items())
    elif name == "hosts" and isinstance(value, list):
        value = ",".join(map(str, value))
    elif name == "env" and isinstance(value, dict):
        value = [key if text is None else f"{key}={_plain(text)}" for key, text in value.items()]
    return _check(known[str(name)], value, source)


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in OF_THE_JOB:
        return f"{name} is not to be chosen: `ronde run` gives it to every rank"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown key {name!r}; " + (f"did you mean {near[0]!r}?" if near else "`ronde run --help` shows all flags")


def _check(option: Option, value: object, source: str) -> Any:  # noqa: ANN401  # as its kind says
    """The value of an option as its kind wants it. ValueError begins with the source."""
    return _CHECKS[option.kind](option, value, source)


def _from_text(option: Option, value: object) -> object:
    """A number of the command line; what is none is left for the check to refuse."""
    kind = {"whole": int, "seconds": float}.get(option.kind)
    try:
        return kind(value) if kind is not None and isinstance(value, str) else value
    except ValueError:
        return value


def _check_whole(option: Option, value: object, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < option.least:
        raise ValueError(f"{source} must be a whole number of at least {option.least:g}, got {value!r}")
    return value


def _check_seconds(option: Option, value: object, source: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not option.least <= value < float("inf"):
        raise ValueError(f"{source} must be a number of seconds of at least {option.least:g}, got {value!r}")
    return float(value)


def _check_text(option: Option, value: object, source: str) -> str:
    if isinstance(value, dict | list) or not _plain(value):
        raise ValueError(f"{source} must be a text, got {value!r}")
    return _plain(value)


def _check_choice(option: Option, value: object, source: str) -> str:
    if value not in option.choices:
        raise ValueError(f"{source} must be {' or '.join(option.choices)}, got {value!r}")
    return str(value)


def _check_switch(option: Option, value: object, source: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{source} must be true or false, got {value!r}")
    return value


def _check_many(option: Option, value: object, source: str) -> tuple[str, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_check_text(option, each, source) for each in values)


def _check_setting(option: Option, value: object, source: str) -> Any:  # noqa: ANN401  # the setting's
    if isinstance(value, dict | list):
        raise ValueError(f"{source} must be one value, got {value!r}")
    return parse_setting(option.name, str(value), source)


_CHECKS: dict[str, Callable[[Option, object, str], Any]] = {
    "whole": _check_whole,
    "seconds": _check_seconds,
    "text": _check_text,
    "choice": _check_choice,
    "switch": _check_switch,
    "many": _check_many,
    "setting": _check_setting,
}


def _plain(value: object) -> str:
    """As a shell would have it: YAML's yes and no are 1 and 0 to a program."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _load_settings(file: Mapping[str, Any], given: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    names = [option.name for option in options() if option.kind == "setting"]
    of_the_job = {PREFIX + name.upper() for name in OF_THE_JOB}  # an outer job's, should we be a rank of one
    return Settings.load(
        {name: given[name] for name in names if name in given},
        {name: text for name, text in environ.items() if name not in of_the_job},
        {name: file[name] for name in names if name in file},
    )


def _make_job(told: Mapping[str, Any], command: tuple[str, ...], settings: Settings, environ: Mapping[str, str]) -> Job:
    hosts = _hosts(told)
    num_ranks = told.get("num_ranks") or sum(host.slots for host in hosts) or 1
    place(hosts, num_ranks)
    debug_rank = told.get("debug")
    if debug_rank is not None and debug_rank >= num_ranks:
        raise ValueError(f"--debug {debug_rank}: there are only ranks 0 to {num_ranks - 1}")
    if debug_rank is not None and told.get("top"):
        raise ValueError("--debug and --top both want the terminal: give one of them")
    default = Job(command=command, num_ranks=num_ranks)
    return Job(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        ssh=Ssh(
            port=told.get("ssh_port", 0),
            identity=told.get("ssh_identity", ""),
            options=told.get("ssh_option", ()),
            start_s=told.get("ssh_start_s", default.ssh.start_s),
        ),
        python=told.get("python", ""),
        env=_variables(told.get("env", ()), environ),
        cwd=str(Path(told["cwd"]).absolute()) if "cwd" in told else default.cwd,
        settings=settings,
        tf_config=told.get("tf_config", False),
        bind=told.get("bind", "none"),
        debug_rank=debug_rank,
        name=told.get("name", ""),
        grace_s=told.get("grace", default.grace_s),
        terminate_s=told.get("terminate", default.terminate_s),
    )


def _hosts(told: Mapping[str, Any]) -> tuple[Host, ...]:
    if "hosts" in told and "hostfile" in told:
        raise ValueError("hosts and hostfile exclude each other: give one of them")
    if "hosts" in told:
        return parse_hosts(told["hosts"])
    return read_hostfile(told["hostfile"]) if "hostfile" in told else ()


def _variables(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise ValueError(f"-x {text!r}: a variable is NAME=VALUE, or NAME for its value here")
        if not equals and name not in environ:
            raise ValueError(f"-x {name}: there is no such variable here; give it a value, as in {name}=1")
        variables[name] = value if equals else environ[name]
    return variables
