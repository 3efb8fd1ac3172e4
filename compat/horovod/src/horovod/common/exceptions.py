"""Horovod's exceptions, and translate_errors(), which converts ronde's errors into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ronde.errors import Mismatch, NotInitialized, RondeError

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks disagree, or one of them is gone."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; the training loop may go on with the new one."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework's version is not the one that was expected."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The message for a framework of another version than expected."""
    return (
        f"{name} {installed_version} is installed, but {version} was expected; "
        f"install {name}=={version}, or reinstall ronde-horovod beside {name} {installed_version}"
    )


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise ronde's errors as Horovod's: Mismatch and RondeError become HorovodInternalError, NotInitialized and the
    caller's other mistakes ValueError."""
    try:
        yield
    except NotInitialized as error:
        raise ValueError(NOT_INITIALIZED) from error
    except (Mismatch, RondeError) as error:
        raise HorovodInternalError(str(error)) from error
