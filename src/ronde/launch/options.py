"""What `ronde run` can be asked for: each option once, with its flag, its key in a file, its kind and its meaning. Used
by the command line for its flags and by launch/config for the keys of a file.

Every setting that a user may choose is an option too; see ronde.settings.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from ronde.launch.job import Job, Ssh
from ronde.settings import OF_THE_JOB, describe

__all__ = ["Kind", "Option", "options"]

Kind: TypeAlias = Literal["whole", "seconds", "text", "hosts", "choice", "switch", "many", "setting"]

RANKS, REMOTE, ENVIRONMENT = "Ranks and hosts", "Other hosts", "What ranks get"
OUTPUT, ENDING, SETTINGS = "Output", "Watching and ending", "Settings of ronde itself"


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be asked for."""

    name: str
    """Its key in a file; the flag is the same with dashes."""
    kind: Kind
    group: str
    help: str
    flags: tuple[str, ...] = ()
    """Further, shorter flags."""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: float = 0

    @property
    def flag(self) -> str:
        """As on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def all_flags(self) -> tuple[str, ...]:
        """Short ones first."""
        return (*self.flags, self.flag)


def _default(kind: type[Job] | type[Ssh], name: str) -> str:
    return f"Default: {next(field.default for field in fields(kind) if field.name == name):g}."


_OWN = (
    Option(
        "num_ranks", "whole", RANKS, "Number of ranks. Default: all slots of the hosts, or 1.", ("-np", "-n"), least=1
    ),
    Option("hosts", "hosts", RANKS, "Hosts and their slots, as in host1:2,host2:4.", ("-H",), "HOST:SLOTS,…"),
    Option("hostfile", "text", RANKS, "File of hosts, one per line: `host`, `host:4` or `host slots=4`.", (), "FILE"),
    Option("config", "text", RANKS, "YAML file; its keys are these flags, with underscores.", (), "FILE"),
    Option("ssh_port", "whole", REMOTE, "Port of the hosts' ssh servers.", (), "PORT", least=1),
    Option("ssh_identity", "text", REMOTE, "File of the private key for ssh.", (), "FILE"),
    Option(
        "ssh_option", "many", REMOTE, "Option for ssh, as in StrictHostKeyChecking=no. Repeatable.", (), "NAME=VALUE"
    ),
    Option(
        "ssh_start_s",
        "seconds",
        REMOTE,
        f"How long a host may take to answer. {_default(Ssh, 'start_s')}",
        (),
        "SECONDS",
        least=0.1,
    ),
    Option(
        "python",
        "text",
        REMOTE,
        "Python that has ronde, on the other hosts. Default: the path of this one.",
        (),
        "PATH",
    ),
    Option(
        "env",
        "many",
        ENVIRONMENT,
        "Variable for every rank. Repeatable; without a value: as it is here.",
        ("-x",),
        "NAME[=VALUE]",
    ),
    Option("cwd", "text", ENVIRONMENT, "Working directory of every rank. Default: this one.", (), "DIR"),
    Option(
        "bind",
        "choice",
        ENVIRONMENT,
        "With `core`, bind each rank to cores of its own. Default: none.",
        (),
        "none|core",
        ("none", "core"),
    ),
    Option("tf_config", "switch", ENVIRONMENT, "Give every rank a TF_CONFIG, for TensorFlow's own strategies."),
    Option("output", "text", OUTPUT, "Also write what each rank prints to files in this directory.", (), "DIR"),
    Option("no_fold", "switch", OUTPUT, "Show equal lines of several ranks one by one."),
    Option("timestamps", "switch", OUTPUT, "Begin each line with the time."),
    Option("no_color", "switch", OUTPUT, "No colours."),
    Option("top", "switch", ENDING, "Show a live table of the ranks, as `ronde top`, instead of what they print."),
    Option("name", "text", ENDING, "Name of the job, for `ronde top` and `ronde stack`.", (), "NAME"),
    Option("debug", "whole", ENDING, "Give this rank the terminal; nobody times out.", (), "RANK"),
    Option(
        "grace",
        "seconds",
        ENDING,
        f"After a failure, the others get so long to end by themselves. {_default(Job, 'grace_s')}",
        (),
        "SECONDS",
    ),
    Option(
        "terminate", "seconds", ENDING, f"Between SIGTERM and SIGKILL. {_default(Job, 'terminate_s')}", (), "SECONDS"
    ),
)


@functools.cache
def options() -> tuple[Option, ...]:
    """All options, in the order of their groups."""
    return (*_OWN, *_of_settings())


def _of_settings() -> Iterable[Option]:
    for setting in describe():
        if setting.name not in OF_THE_JOB:
            shown = "" if setting.default in ("", None) else f" Default: {setting.default}."
            yield Option(setting.name, "setting", SETTINGS, setting.help + shown, (), _metavar(setting.default))


def _metavar(default: object) -> str:
    if isinstance(default, bool):
        return "1|0"
    return {int: "N", float: "SECONDS"}.get(type(default), "TEXT")
