"""The job's secret and all that is derived from it. Used by door (proofs) and control (CURVE keys).

One job has one seed of 32 random bytes. It travels only in the environment of the job's own processes; what goes over
a network is derived from it one way, under a label of its own, so that no use can be mistaken for another.

A secret of the user, kept in a file, and the keys of jobs derived from it. Used by comm/guest where no launcher of
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
from typing import NoReturn

import zmq
from zmq.utils import z85

from ronde.errors import StartFailed

__all__ = ["JobKey", "derive_job_key", "load_user_secret", "new_job_key"]

SEED_BYTES = 32


def new_job_key() -> str:
    """A fresh secret for one job, as 64 hexadecimal digits."""
    return secrets.token_hex(SEED_BYTES)


class JobKey:
    """The secret of one job. Whoever holds it is a member; it shows itself in no text and in no pickle."""

    __slots__ = ("_seed", "client_public", "client_secret", "server_public", "server_secret")

    server_secret: bytes
    """The coordinator's CURVE keys and the workers', as the 40 characters of Z85 that ZeroMQ takes."""
    server_public: bytes
    client_secret: bytes
    client_public: bytes

    def __init__(self, hex: str) -> None:
        # The value is not repeated in the error: a mistyped secret is still nearly a secret.
        digits = "0123456789abcdefABCDEF"
        if not isinstance(hex, str) or len(hex) != 2 * SEED_BYTES or not set(hex) <= set(digits):
            raise ValueError(
                f"the job's key must be {2 * SEED_BYTES} hexadecimal digits; make one with ronde.net.keys.new_job_key()"
            )
        self._seed = bytes.fromhex(hex)
        self.server_secret, self.server_public = self._curve_pair(b"server")
        self.client_secret, self.client_public = self._curve_pair(b"client")

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the label and the parts. Each goes in with its length, so no two lists look alike."""
        digest = hmac.new(self._seed, b"ronde", hashlib.sha256)
        for part in (label, *parts):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()

    def _curve_pair(self, role: bytes) -> tuple[bytes, bytes]:
        secret = z85.encode(self.mac(b"curve", role))
        return secret, zmq.curve_public(secret)

    def __repr__(self) -> str:
        """Never the secret."""
        return "JobKey(hidden)"

    def __reduce__(self) -> NoReturn:
        """A pickle would carry the secret to where nobody expects it."""
        raise TypeError("a JobKey cannot be pickled; hand on the hexadecimal digits in the environment")


SECRET_FILE_NAME = "secret"
SECRET_BYTES = 32


def derive_job_key(secret: bytes, job: str) -> str:
    """The key of a job, as 64 hexadecimal digits."""
    return hmac.new(secret, b"ronde job key\0" + job.encode(), hashlib.sha256).hexdigest()


def load_user_secret(directory: Path) -> bytes:
    """The secret in that folder; made if there is none."""
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
    """Write it aside and link it to its name: the name shows up complete, and only for the first one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f"{SECRET_FILE_NAME}.{secrets.token_hex(8)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w") as file:  # noqa: PTH123  # a descriptor, not a path
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)
