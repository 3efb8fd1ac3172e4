"""Functions and classes that an option names, as in `mytransforms:resize`: where their modules are looked for, and what
is said when there is none. One rule for all commands and sections of job files.

Modules are looked for in the working directory, then in the folder of the job file, if there is one, and then where
Python looks by itself. The folders are put into `sys.path`, so that modules find each other and function ranks get
them (function.pickle_call).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["load_function", "module_folders", "module_path", "search_modules_beside", "search_working_directory"]


def module_folders(job_file: str = "") -> list[str]:
    """The folders in which modules are looked for before all others, in their order."""
    folders = [Path.cwd(), *([Path(job_file).resolve().parent] if job_file else [])]
    return list(dict.fromkeys(map(str, folders)))


def search_modules_beside(job_file: str = "") -> None:
    """Look for modules in the working directory and beside this job file, if there is one, from now on. Called by
    commands that were given a name, and by no others: the user may have files of any name there, also such as the
    standard library has."""
    folders = module_folders(job_file)
    if sys.path[: len(folders)] != folders:
        sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
        importlib.invalidate_caches()


def load_function(name: str) -> Callable[..., Any]:
    """Import the module of `module:function`, and return the function or class. ValueError if there is none: it says
    where the module was looked for."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{name!r} must be module:function, as in mytransforms:resize")
    search_working_directory()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{name!r}: the module {module_name} needs {error.name}, which is not installed") from None
        where = ", ".join(_searched_folders())
        raise ValueError(
            f"{name!r}: there is no module {error.name!r} in {where}, nor is it installed; a module has to be in the "
            "working directory or beside the job file"
        ) from None
    except ImportError as error:
        raise ValueError(f"{name!r}: the module {module_name} cannot be imported: {error}") from None
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name!r}: {getattr(found, '__file__', None) or found.__name__} has no {part}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name!r} is no function")
    loaded: Callable[..., Any] = found
    return loaded


def module_path(name: str) -> Path | None:
    """The file of the module of `module:function`; None if it is not found, or is no file."""
    search_working_directory()
    try:
        spec = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError):  # a package above it is missing, or it is no name
        return None
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.is_file() else None


def search_working_directory() -> None:
    """Look for modules in the working directory, too, from now on: for programs that are no command of ronde."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _searched_folders() -> list[str]:
    """The folders of sys.path before the standard library: all that are the user's."""
    library = str(Path(os.__file__).parent)
    entries = sys.path[: sys.path.index(library)] if library in sys.path else sys.path
    command = str(Path(sys.argv[0]).parent)  # of a console script, which has no modules
    return [entry for entry in entries if entry != command and Path(entry).is_dir() and entry]
