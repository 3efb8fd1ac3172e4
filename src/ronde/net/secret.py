"""A secret of the user, kept in a file, and the keys of jobs derived from it. Used by comm/guest where no launcher of
ours has given the ranks a key.

Ranks of one user that see the same file and know the same job derive the same key without a word. The file is made
once, readable by its owner only; when several ranks make it at the same time, exactly one of them does.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from ronde.errors import StartFailed

__all__ = ["derive_key", "user_secret"]

NAME = "secret"
NUM_BYTES = 32


def derive_key(secret: bytes, job: str) -> str:
    """The key of a job, as 64 hexadecimal digits."""
    return hmac.new(secret, b"ronde job key\0" + job.encode(), hashlib.sha256).hexdigest()


def user_secret(folder: Path) -> bytes:
    """The secret in that folder; made if there is none."""
    path = folder / NAME
    try:
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
        _make(path)
        return _read(path)
    except OSError as error:
        raise StartFailed(
            f"cannot keep a secret for jobs of other launchers in {path} ({error.strerror}); "
            "give all ranks the same RONDE_KEY (64 hexadecimal digits)"
        ) from None


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StartFailed(
                f"{path} must belong to you and be read by nobody else (it has owner {found.st_uid} and mode "
                f"{stat.S_IMODE(found.st_mode):04o}); remove it to get a new one, or give all ranks the same RONDE_KEY"
            )
        text = file.read(2 * NUM_BYTES + 1).strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != NUM_BYTES:
        raise StartFailed(f"{path} does not hold {2 * NUM_BYTES} hexadecimal digits; remove it to get a new one")
    return secret


def _make(path: Path) -> None:
    """Write it aside and link it to its name: the name shows up complete, and only for the first one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f"{NAME}.{secrets.token_hex(8)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w") as file:  # noqa: PTH123  # a descriptor, not a path
            file.write(secrets.token_hex(NUM_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)
