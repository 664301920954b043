"""`python -m flows.control FILE`: servers that outlive runs (Prefect, MLflow, and their Postgres).

FILE is the boot file of the machine (`infra/terraform/modules/control/user_data.sh.tftpl`). This process starts and
supervises the three servers under its own user. Postgres listens on a socket in a folder that only this user can read,
and needs no password. Prefect and MLflow listen on the machine's address and require passwords, which they get through
their environment. The process ends once a server can't be restarted; systemd then starts it again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from areal_core.errors import ConfigError, ProcessError
from areal_core.run.command import run_command
from areal_core.run.roles import python
from flows.machine import read_boot_file, secret_values
from flows.places import WORK
from flows.services import MARK, Services
from flows.stack import MLFLOW_ENVIRONMENT, responds

_DATABASES = ("prefect", "mlflow", "mlflow_users")
_RESTARTS = 5
_MLFLOW_USERS = """\
[mlflow]
default_permission = READ
database_uri = {database}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""  # everyone may read everything; only owners may write
_MLFLOW_PASSWORD = 12  # least number of characters, required by MLflow


class Control(msgspec.Struct, forbid_unknown_fields=True):
    """Boot file of the control machine. It contains no secrets."""

    address: str  # address of this machine, on which the servers listen
    state: str  # folder of the database, logs and Prefect's home; it outlives the machine
    artifacts: str  # MLflow's artifact store, s3://bucket/prefix
    region: str
    prefect_secret: str  # name of the SSM parameter that holds user:password
    mlflow_secret: str  # name of the SSM parameter with the password of MLflow's user `admin`
    prefect_port: int = 4200
    mlflow_port: int = 5000


class Database:
    """A Postgres server of this user. Raises ProcessError if Postgres is missing or fails."""

    def __init__(self, folder: Path) -> None:
        self.data, self.sockets = folder / "data", folder / "sockets"
        newest = max(
            Path("/usr/lib/postgresql").glob("*/bin"), key=lambda found: float(found.parent.name), default=None
        )
        if newest is None and shutil.which("postgres") is None:
            raise ProcessError("Postgres is not installed; on Debian: apt install postgresql")
        self._programs = "" if newest is None else f"{newest}/"
        self.sockets.mkdir(parents=True, exist_ok=True)
        self.sockets.chmod(0o700)
        if not self.data.exists():
            self._make()

    @property
    def argv(self) -> list[str]:
        options = ("listen_addresses=", f"unix_socket_directories={self.sockets}", "max_connections=200")
        return [f"{self._programs}postgres", "-D", str(self.data), *(word for each in options for word in ("-c", each))]

    def responds(self) -> bool:
        return self._ask("pg_isready", "--quiet", "--host", str(self.sockets)).returncode == 0

    def create(self, name: str) -> None:
        """Create a database unless it exists."""
        there = self._run("psql", "--host", str(self.sockets), "--list", "--tuples-only", "--no-align", "postgres")
        if name not in {line.partition("|")[0] for line in there.splitlines()}:
            self._run("createdb", "--host", str(self.sockets), name)

    def url(self, name: str, driver: str = "postgresql") -> str:
        return f"{driver}:///{name}?host={self.sockets}"

    def _make(self) -> None:
        """Create the data folder atomically, so that a kill leaves no partial folder."""
        part = self.data.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        self._run("initdb", "--pgdata", str(part), "--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8")
        part.rename(self.data)

    def _run(self, program: str, *arguments: str) -> str:
        ended = self._ask(program, *arguments)
        if ended.returncode:
            raise ProcessError(f"{program}: {' '.join((ended.stderr or ended.stdout).split())}")
        return ended.stdout

    def _ask(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([f"{self._programs}{program}", *arguments], capture_output=True, text=True)


def serve() -> None:
    """Run the servers until asked to stop. Raises ProcessError, ConfigError, StorageError."""
    os.environ[MARK] = secrets.token_hex(8)
    control = read_boot_file(Control)
    asked = {"prefect": control.prefect_secret, "mlflow": control.mlflow_secret}
    passwords = secret_values(control.region, asked)
    if len(passwords["mlflow"]) < _MLFLOW_PASSWORD:
        raise ConfigError(
            f"{control.mlflow_secret}: must have at least {_MLFLOW_PASSWORD} characters, got {len(passwords['mlflow'])}"
        )
    state = Path(control.state)
    logs = state / "logs"
    logs.mkdir(exist_ok=True)
    database = Database(state / "postgres")
    users = state / "mlflow.ini"
    users.write_text(_MLFLOW_USERS.format(database=database.url("mlflow_users")))
    with Services(cwd=WORK, logs=logs) as services:
        services.start("postgres", database.argv, {}, restarts=_RESTARTS)
        services.until_ready({"postgres": database.responds})
        for name in _DATABASES:
            database.create(name)
        services.start(
            "prefect-server",
            python("flows.prefect_server", "--host", control.address, "--port", control.prefect_port),
            {
                "DO_NOT_TRACK": "1",
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "PREFECT_HOME": str(state / "prefect"),
                "PREFECT_API_DATABASE_CONNECTION_URL": database.url("prefect", "postgresql+asyncpg"),
                "PREFECT_SERVER_API_AUTH_STRING": passwords["prefect"],
            },
            restarts=_RESTARTS,
        )
        services.start(
            "mlflow",
            python(
                *("mlflow", "server", "--host", control.address, "--port", control.mlflow_port),
                *("--backend-store-uri", database.url("mlflow"), "--artifacts-destination", control.artifacts),
                *("--app-name", "basic-auth", "--workers", "2"),
            ),
            {
                "MLFLOW_AUTH_CONFIG_PATH": str(users),
                "MLFLOW_AUTH_ADMIN_USERNAME": "admin",
                "MLFLOW_AUTH_ADMIN_PASSWORD": passwords["mlflow"],
                "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
                **MLFLOW_ENVIRONMENT,
            },
            restarts=_RESTARTS,
        )
        services.until_ready(
            {
                "prefect-server": lambda: responds(f"http://{control.address}:{control.prefect_port}/api/health"),
                "mlflow": lambda: responds(f"http://{control.address}:{control.mlflow_port}/health"),
            }
        )
        print("Prefect and MLflow respond.", flush=True)
        for line in services.watch():
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(serve))
