"""A real MariaDB server in a temporary directory, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess

from .server import PASSWORD, Server

_SETUP = f"""
CREATE USER IF NOT EXISTS 'moeopt'@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON *.* TO 'moeopt'@'127.0.0.1';
"""


class MariaServer(Server):
    """Starts and kills a server (Debian's package `mariadb-server-core`); its data outlives a restart."""

    def __init__(self) -> None:
        super().__init__("moeopt-maria-")
        self._setup = self._directory / "setup.sql"
        self._setup.write_text(_SETUP)
        # A server started as root changes to nobody, whose the data must be.
        self._as = ["--user=nobody"] if os.geteuid() == 0 else []
        if self._as:
            shutil.chown(self._directory, "nobody")
        subprocess.run(
            [
                "mariadb-install-db", "--no-defaults", f"--datadir={self._data}", "--skip-test-db", *self._as,
                "--auth-root-authentication-method=normal",
            ],
            check=True, capture_output=True,
        )  # fmt: skip

    def start(self) -> None:
        log = (self._directory / "log").open("ab")
        server = shutil.which("mariadbd") or "/usr/sbin/mariadbd"
        self.process = subprocess.Popen(
            [
                server, "--no-defaults", f"--datadir={self._data}", f"--port={self.port}", "--bind-address=127.0.0.1",
                f"--socket={self._directory}/socket", f"--pid-file={self._directory}/pid",
                f"--init-file={self._setup}", *self._as,
            ],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self._wait()

    def _answers(self) -> bool:
        import pymysql

        try:
            self._connect().close()
        except pymysql.OperationalError:
            return False
        return True

    def _connect(self):  # type: ignore[no-untyped-def]
        import pymysql

        return pymysql.connect(host="127.0.0.1", port=self.port, user="moeopt", password=PASSWORD)

    def url_of(self, database: str, password: str = PASSWORD) -> str:
        return f"mysql://moeopt:{password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Makes an empty database and returns its URL."""
        with self._connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE `{name}`")
        return self.url_of(name)
