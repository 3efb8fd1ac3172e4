"""The job's key and what is derived from it, and the user's secret from which jobs of other launchers derive their key.

A key is a seed of 32 random bytes. It travels only in the environment of the job's own processes; what goes over a
network is derived from it one way, under a label of its own, so that no use can be mistaken for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

import zmq
from zmq.utils import z85

from ronde.errors import StartFailed

SEED_BYTES = 32


def new_job_key() -> str:
    """Return a new key, as 64 hexadecimal digits."""
    return secrets.token_hex(SEED_BYTES)


class JobKey:
    """The secret of one job. A process that has it belongs to the job. It appears in no text and in no pickle."""

    def __init__(self, hex: str) -> None:
        # The error does not repeat the value: a mistyped secret is still nearly a secret.
        digits = "0123456789abcdefABCDEF"
        if not isinstance(hex, str) or len(hex) != 2 * SEED_BYTES or not set(hex) <= set(digits):
            raise ValueError(
                f"the job's key must be {2 * SEED_BYTES} hexadecimal digits; make one with Python's "
                f"secrets.token_hex({SEED_BYTES})"
            )
        self._seed = bytes.fromhex(hex)
        # The CURVE keys of the coordinator and of the workers, as the 40 characters of Z85 that ZeroMQ takes.
        self.server_secret = z85.encode(self.mac(b"curve", b"server"))
        self.server_public = zmq.curve_public(self.server_secret)
        self.client_secret = z85.encode(self.mac(b"curve", b"client"))
        self.client_public = zmq.curve_public(self.client_secret)

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of the label and the parts, each with its length, so that no two lists are alike."""
        digest = hmac.new(self._seed, b"ronde", hashlib.sha256)
        for part in (label, *parts):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()

    def __repr__(self) -> str:
        return "JobKey(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a JobKey cannot be pickled; hand on the hexadecimal digits in the environment")


SECRET_FILE_NAME = "secret"
SECRET_BYTES = 32


def derive_job_key(secret: bytes, job: str) -> str:
    """Return the key of a job, as 64 hexadecimal digits."""
    return hmac.new(secret, b"ronde job key\0" + job.encode(), hashlib.sha256).hexdigest()


def load_user_secret(directory: Path) -> bytes:
    """Return the secret in that directory. If there is none it is created; of several ranks at a time, one succeeds."""
    path = directory / SECRET_FILE_NAME
    try:
        with contextlib.suppress(FileNotFoundError):
            return _read_secret_file(path)
        _create_secret_file(path)
        return _read_secret_file(path)
    except OSError as error:
        raise StartFailed(
            f"cannot keep a secret for jobs of other launchers in {path} ({error.strerror}); "
            "give all ranks the same RONDE_KEY (64 hexadecimal digits)"
        ) from None


def _read_secret_file(path: Path) -> bytes:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StartFailed(
                f"{path} must belong to you and be read by nobody else (it has owner {found.st_uid} and mode "
                f"{stat.S_IMODE(found.st_mode):04o}); remove it to get a new one, or give all ranks the same RONDE_KEY"
            )
        text = file.read(2 * SECRET_BYTES + 1).strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise StartFailed(f"{path} does not hold {2 * SECRET_BYTES} hexadecimal digits; remove it to get a new one")
    return secret


def _create_secret_file(path: Path) -> None:
    """Write another file and link it to the name, which thus appears with its content, and only for the first one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{SECRET_FILE_NAME}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w") as file:  # noqa: PTH123  # a descriptor, not a path
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
