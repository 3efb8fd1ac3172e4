"""`ronde workflow`: carries out the sections of a job file one after the other, each by its own command.

A step is done when its command has succeeded; then its fingerprint is written down. The fingerprint covers the values
of its section, the files and functions that they name, and the fingerprints of all steps before it. A step whose
fingerprint is unchanged is skipped, so a workflow that was killed, or has failed, goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ronde.cli.arguments import CommandParser, print_error
from ronde.errors import RondeError
from ronde.exit_codes import INTERRUPTED_CODE, shell_exit_code
from ronde.launch.config import read_config, read_section, read_sections
from ronde.launch.named_functions import module_folders
from ronde.text import format_duration, shorten

DESCRIPTION = """Carry out the sections of a job file: data, search, run, export, predict.

  ronde workflow job.yaml

Each section that the file has is a step: `ronde data prepare`, `ronde search`,
`ronde run`, `ronde export`, `ronde predict`. A step that is done is skipped while
its section, the files it reads and the steps before it are unchanged. A workflow
that was killed goes on where it was. In the command of `run`, {best.NAME} stands
for a parameter that the search has found."""

MAX_SCRIPT_BYTES = 1 << 20
BEST_PATTERN = re.compile(r"\{best\.([^{}]+)\}")


@dataclass(frozen=True)
class WorkflowStep:
    """A section of a job file, and the command that carries it out."""

    section: str
    make_command: Callable[[str, Mapping[str, Any]], list[str]]
    """Of the job file and its sections: the words behind `ronde`."""
    check: Callable[[str], object]
    """Reads the section as its command does. ValueError names a wrong key with its line."""
    paths: tuple[str, ...]
    """Keys of the section with a file or folder that the step reads."""
    functions: tuple[str, ...]
    """Keys with a `module:function`."""
    result: Callable[[Mapping[str, Any]], Path | None]
    """A file that is there when the step is done, if it is known."""
    force: str = ""
    """The flag with which the command replaces what was made from other inputs."""
    journal: str = ""
    """A file beside the result that is there from the beginning of the step on."""


class StepRecord(msgspec.Struct, frozen=True):
    """A step that was begun, or is to be done again, and whether it has been done."""

    fingerprint: str
    is_done: bool
    replaces_before: float = 0.0
    """The step replaces what was made before this time; 0 if it replaces nothing."""


class WorkflowRecord(msgspec.Struct):
    """The contents of the file beside the job file, by section."""

    steps: dict[str, StepRecord] = {}


def _check_with(section: str, module: str, name: str) -> Callable[[str], object]:
    def check(path: str) -> object:
        import importlib

        return read_section(path, section, getattr(importlib.import_module(module), name))

    return check


def _check_search(path: str) -> object:
    from ronde.cli.search import read_options

    return read_options(path, {})


def _check_best(path: str, sections: Mapping[str, Any]) -> None:
    """ValueError if the command of `run` has a {best.NAME} that is no parameter of the search."""
    names = {match[1] for word in _run_words(sections) for match in BEST_PATTERN.finditer(word)}
    if names and "search" not in sections:
        raise ValueError(f"{path}: the command of `run` has {{best.…}}, but there is no section `search`")
    known = sections["search"]["space"] if names else {}
    for name in sorted(names - known.keys()):
        raise ValueError(f"{path}: the search has no parameter {name!r}; it has {', '.join(known)}")


def _run_words(sections: Mapping[str, Any]) -> list[str]:
    """The words of the command of `run`."""
    command = sections.get("run", {}).get("command", "")
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


def _run_command(path: str, sections: Mapping[str, Any]) -> list[str]:
    """`ronde run`, with the parameters that the search has found in its command."""
    words = _run_words(sections)
    if not any(map(BEST_PATTERN.search, words)):
        return ["run", "--config", path]
    from ronde.search.results import format_value

    file = _search_result(sections["search"])
    try:
        best = msgspec.json.decode(file.read_bytes())["best"]["params"]
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        raise ValueError(f"{file} has no best trial, which the command of `run` needs") from None

    found = [BEST_PATTERN.sub(lambda match: format_value(best[match[1]]), word) for word in words]
    return ["run", "--config", path, "--", *found]


def _search_result(section: Mapping[str, Any]) -> Path:
    return Path(section.get("output", "search"), "trials.json")


def _inside(name: str) -> Callable[[Mapping[str, Any]], Path | None]:
    """A file of the output folder, if that is one of this machine."""
    return lambda section: None if "://" in str(section.get("output", "")) else Path(str(section["output"]), name)


def _predict_result(section: Mapping[str, Any]) -> Path | None:
    output = str(section["output"])
    if "://" in output:
        return None
    return (
        Path(f"{output}.manifest.json")
        if Path(output).suffix in (".csv", ".jsonl", ".parquet")
        else Path(output, "manifest.json")
    )


STEPS = (
    WorkflowStep(
        "data",
        lambda path, _: ["data", "prepare", path],
        _check_with("data", "ronde.data.preparation", "PrepareOptions"),
        ("input",),
        ("input", "transform"),
        _inside("index.json"),
        force="--force",
    ),
    WorkflowStep(
        "search",
        lambda path, _: ["search", path],
        _check_search,
        (),
        ("objective", "setup"),
        lambda section: _search_result(section),
        force="--overwrite",
        journal="journal.log",
    ),
    WorkflowStep("run", _run_command, read_config, (), (), lambda section: None),
    WorkflowStep(
        "export",
        lambda path, _: ["export", path],
        _check_with("export", "ronde.serve.export", "ExportOptions"),
        ("checkpoint",),
        ("model",),
        _inside("model.json"),
    ),
    WorkflowStep(
        "predict",
        lambda path, _: ["predict", path],
        _check_with("predict", "ronde.predict", "PredictOptions"),
        ("input", "model"),
        ("preprocess", "postprocess"),
        _predict_result,
        force="--force",
    ),
)


# --- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint_step(
    step: WorkflowStep,
    section: Mapping[str, Any],
    before: Sequence[str],
    made: Sequence[str],
    *,
    words: Sequence[str],
    folders: Sequence[Path],
) -> str:
    """Of a section's values, its command, what they name, and the steps before it. Paths below those of `made`, the
    outputs of earlier steps, are not looked at: those steps stand for them. Modules are looked for in these folders."""
    facts: list[Any] = [step.section, section, *before, words]
    for key in step.paths:
        text = str(section.get(key, ""))
        if text and not any(text == each or text.startswith(f"{each}/") for each in made):
            facts.append([key, _fingerprint_path(text)])
    for key in step.functions:
        facts.append([key, _fingerprint_function(str(section.get(key) or ""), folders)])
    command = section.get("command", "")
    named = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    facts += [[word, _fingerprint_script(Path(word))] for word in named if Path(word).is_file()]
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted", enc_hook=str)).hexdigest()


def _fingerprint_path(text: str) -> str:
    """Names, sizes and times of the files; empty if there are none (the command will say so), or if they are far away:
    the command itself knows whether they have changed."""
    path = Path(text)
    if "://" in text or not path.exists():
        return ""
    from ronde.data.files import LocalFolder

    digest = hashlib.sha256()
    for info in LocalFolder(path).list_files():
        digest.update(repr(tuple(info)).encode())
    return digest.hexdigest()


def _fingerprint_script(path: Path) -> str:
    """The contents of a script, which a checkout may write anew without a change; of a large file, as of data."""
    if path.stat().st_size > MAX_SCRIPT_BYTES:
        return _fingerprint_path(str(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fingerprint_function(name: str, folders: Sequence[Path]) -> str:
    """The contents of the module's file, if it is in one of these folders."""
    module, colon, _ = name.partition(":")
    if not module or not colon:
        return ""
    place = Path(*module.split("."))
    paths = (folder / each for folder in folders for each in (place.with_suffix(".py"), place / "__init__.py"))
    found = next((path for path in paths if path.is_file()), None)
    return "" if found is None else hashlib.sha256(found.read_bytes()).hexdigest()


# --- carrying out ----------------------------------------------------------------------------------------------------


def workflow(arguments: Sequence[str]) -> int:
    parser = CommandParser("workflow", DESCRIPTION, usage="JOB.yaml [FLAGS]")
    parser.add_argument("job", metavar="JOB.yaml", help="Job file.")
    parser.add_flag("--from", dest="start", metavar="SECTION", help="Do this step and those behind it again.")
    flags = parser.parse(arguments)
    try:
        sections = read_sections(flags.job)
        steps = [step for step in STEPS if step.section in sections]
        if not steps:
            raise ValueError(f"{flags.job} has none of the sections {', '.join(step.section for step in STEPS)}")
        if flags.start is not None and flags.start not in [step.section for step in steps]:
            raise ValueError(f"--from must be one of {', '.join(step.section for step in steps)}, got {flags.start!r}")
        for step in steps:  # a mistake in the last section is said before the first step
            step.check(flags.job)
        _check_best(flags.job, sections)
        with _lock(flags.job) as lock:
            return _carry_out(flags.job, sections, steps, flags.start, lock)
    except (ValueError, ModuleNotFoundError) as error:
        return print_error(parser.prog, error)
    except (RondeError, OSError) as error:
        print_error(parser.prog, error)
        return 1


def _carry_out(
    path: str, sections: Mapping[str, Any], steps: Sequence[WorkflowStep], start: str | None, lock: BinaryIO
) -> int:
    file = _record_path(path)
    record = _read_record(file)
    before: list[str] = []
    made: list[str] = []
    folders = [Path(each) for each in module_folders(path)]
    if start is not None:
        names = [step.section for step in steps]
        for name in names[names.index(start) :]:
            record.steps[name] = StepRecord("", is_done=False)  # other than any: it is replaced, also if this is killed
        _write_record(file, record)
    for number, step in enumerate(steps, start=1):
        section = sections[step.section]
        shown = f"[{number}/{len(steps)}] {step.section}"
        words = step.make_command(path, sections)
        named = [word for word in words if word != path]
        fingerprint = fingerprint_step(step, section, before, made, words=named, folders=folders)
        before.append(fingerprint)
        if section.get("output"):
            made.append(str(section["output"]))
        known = record.steps.get(step.section)
        result = step.result(section)
        is_same = known is not None and known.fingerprint == fingerprint
        if is_same and known is not None and known.is_done and (result is None or result.exists()):
            print(f"{shown}: done before, nothing has changed", flush=True)
            continue
        replaces_before = 0.0
        if known is not None and not is_same:
            replaces_before = time.time()
        elif known is not None and not known.is_done:  # it was killed, perhaps before it has replaced anything
            replaces_before = known.replaces_before
        if step.force and _has_older_result(step, result, replaces_before):
            words.append(step.force)
        record.steps[step.section] = StepRecord(fingerprint, is_done=False, replaces_before=replaces_before)
        _write_record(file, record)
        print(f"{shown}: ronde {shlex.join(words)}", flush=True)
        started = time.monotonic()
        code = _run_step(words, lock)
        if code:
            text = f"{step.section} has failed with code {shell_exit_code(code)}; the same command goes on from here"
            if step.force:
                text += f", and with --from {step.section} it replaces what is there"
            print_error("ronde workflow", text)
            return shell_exit_code(code)
        record.steps[step.section] = StepRecord(fingerprint, is_done=True)
        _write_record(file, record)
        print(f"{shown}: done in {format_duration(time.monotonic() - started)}", flush=True)
    return 0


def _has_older_result(step: WorkflowStep, result: Path | None, time_s: float) -> bool:
    """Whether there is something that a former run, before this time, has made or begun."""
    if result is None:  # far away
        return time_s > 0
    paths = [result, result.with_name(step.journal)] if step.journal else [result]
    return any(path.exists() and path.stat().st_mtime < time_s for path in paths)


def _run_step(words: Sequence[str], lock: BinaryIO) -> int:
    """Run a command as a process of its own. It inherits the lock: a step that outlives a killed workflow keeps the
    next one waiting. Signals that ask this process to end are passed on."""
    process = subprocess.Popen([sys.executable, "-m", "ronde.cli.main", *words], pass_fds=(lock.fileno(),))
    kept = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        kept[number] = signal.signal(number, lambda received, _: process.send_signal(received))
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the terminal has told the command, too
                with contextlib.suppress(KeyboardInterrupt):
                    process.wait()
                return process.returncode or INTERRUPTED_CODE
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _record_path(path: str) -> Path:
    """The file with what is done, beside the job file."""
    return Path(path).with_suffix(".workflow.json")


def _read_record(path: Path) -> WorkflowRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkflowRecord)
    except FileNotFoundError:
        return WorkflowRecord()
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is damaged: {shorten(str(error))}; remove it to begin anew") from None


def _write_record(path: Path, record: WorkflowRecord) -> None:
    from ronde.data.files import write_aside

    with write_aside(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))


@contextlib.contextmanager
def _lock(path: str) -> Iterator[BinaryIO]:
    """One workflow of a file at a time. Waits for another one, or for the step that a killed one has left."""
    with Path(path).with_suffix(".workflow.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"ronde workflow: waiting for another workflow of {path}, or a step that it has left", file=sys.stderr
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
