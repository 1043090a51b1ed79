"""A real PostgreSQL server in a temporary directory, for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

PASSWORD = "s3cret-Pa55"


def find_binaries() -> Path:
    """The directory of initdb and postgres: Debian keeps it off the PATH."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
    found = [path for path in candidates if (path / "initdb").exists()]
    on_path = shutil.which("initdb")
    if found:
        return found[-1]
    if on_path is not None:
        return Path(on_path).resolve().parent
    raise FileNotFoundError("no PostgreSQL server is installed: apt-get install postgresql")


class Server(ABC):
    """A database server's process with its files in a temporary directory."""

    def __init__(self, prefix: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix=prefix))
        self._data = self._directory / "data"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _answers(self) -> bool: ...

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 60
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._directory / "log").read_text()[-2000:])
            time.sleep(0.1)

    def kill(self) -> None:
        """kill -9 of the server and all its children."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


class PostgresServer(Server):
    """Starts and kills a server; its data outlives a restart."""

    def __init__(self) -> None:
        super().__init__("moeopt-pg-")
        self._bin = find_binaries()
        # The server refuses to run as root.
        self._as = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self._directory, "postgres", "postgres")
        password_file = self._directory / "password"
        password_file.write_text(PASSWORD)
        password_file.chmod(0o644)
        self._run(
            "initdb", "-D", str(self._data), "-U", "moeopt", "-A", "scram-sha-256", "--pwfile", str(password_file),
            "--no-sync", "-E", "UTF8", "--locale=C",
        )  # fmt: skip

    def _run(self, name: str, *args: str) -> None:
        subprocess.run([str(self._bin / name), *args], check=True, capture_output=True, cwd=self._directory, **self._as)

    def start(self) -> None:
        log = (self._directory / "log").open("ab")
        self.process = subprocess.Popen(
            [
                str(self._bin / "postgres"), "-D", str(self._data), "-p", str(self.port), "-h", "127.0.0.1",
                "-k", str(self._directory), "-c", "max_connections=100",
            ],
            stdout=log, stderr=log, cwd=self._directory, start_new_session=True, **self._as,
        )  # fmt: skip
        self._wait()

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(
                self.url_of("postgres").replace("postgresql+psycopg", "postgresql"), connect_timeout=2
            ).close()
        except psycopg.OperationalError:
            return False
        return True

    def url_of(self, database: str, password: str = PASSWORD) -> str:
        return f"postgresql://moeopt:{password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Makes an empty database and returns its URL."""
        import psycopg

        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url_of(name)

    def kill(self) -> None:
        super().kill()
        (self._data / "postmaster.pid").unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
