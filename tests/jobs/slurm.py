"""A Slurm cluster of one node for tests: munged, slurmctld and slurmd of their own on this host, and srun."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from ronde.types import Deadline
from tests.jobs.kit import kill
from tests.limits import CLOSING_S, PATIENCE_S
from tests.services import needs

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
SBIN = "/usr/sbin"


def _missing() -> str:
    found = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}") is None]
    if found:
        return f"no {', '.join(found)}; install slurm-wlm and munge"
    return "" if os.geteuid() == 0 else "the daemons of Slurm need root"


needs_slurm = needs("Slurm", missing=_missing())

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus} RealMemory=100
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End a daemon with the processes that it has started. One that takes too long is killed by the caller."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSING_S)


class SlurmNode:
    """The daemons; a context. Where they do not start, the test is skipped with the reason."""

    def __init__(self, cpus: int) -> None:
        self._opened = ExitStack()
        self._folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="slurm")))
        self._cpus = cpus
        path = f"{os.environ.get('PATH', '')}:{SBIN}"
        self.env = {**os.environ, "PATH": path, "SLURM_CONF": str(self._folder / "slurm.conf")}

    def __enter__(self) -> SlurmNode:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def srun(self, words: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """srun to its end."""
        command = ["srun", "--immediate=60", "--unbuffered", *words]
        return subprocess.run(
            command,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def _start(self) -> None:
        for name, mode in (("munge", 0o755), ("key", 0o700), ("state", 0o755), ("spool", 0o755)):
            (self._folder / name).mkdir()
            (self._folder / name).chmod(mode)
        self._folder.chmod(0o755)
        key = self._folder / "key/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        with socket.socket() as first, socket.socket() as second:
            for each in (first, second):
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in (first, second)]
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(
            host=host, folder=self._folder, controller_port=ports[0], node_port=ports[1], cpus=self._cpus
        )
        (self._folder / "slurm.conf").write_text(text)
        munge = self._folder / "munge"
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge}/socket",
            f"--key-file={key}",
            f"--log-file={munge}/log",
            f"--pid-file={munge}/pid",
            f"--seed-file={munge}/seed",
        )
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", host)
        deadline = Deadline(PATIENCE_S)
        while self._state() != "idle":
            if deadline.expired:
                logs = "\n".join(path.read_text(errors="replace")[-500:] for path in self._folder.glob("slurm*.log"))
                pytest.skip(f"Slurm does not start here: its node is {self._state() or 'unknown'}\n{logs}")
            time.sleep(0.1)

    def _daemon(self, *words: str) -> None:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(words, env=self.env, stdin=quiet, stdout=quiet, stderr=quiet)
        self._opened.callback(kill, process)
        self._opened.callback(_terminate, process)

    def _state(self) -> str:
        command = ["sinfo", "--noheader", "--format=%t"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        return done.stdout.strip()
