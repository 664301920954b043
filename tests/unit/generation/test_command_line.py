"""The token that a generation server wants, and where it does without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from areal_core.generation.command_line import server_parser, server_token


def token(*options: object) -> str | None:
    return server_token(server_parser("m").parse_args(["--model", "m", *map(str, options)]))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_local_server_needs_no_token(host: str) -> None:
    assert token("--host", host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org"])
def test_a_server_that_other_machines_reach_needs_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--token-file: must be given where other machines reach .*, at {host}$"):
        token("--host", host)
    (tmp_path / "token").write_text("secret\n")
    assert token("--host", host, "--token-file", tmp_path / "token") == "secret"


def test_a_file_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--token-file: can't read \S+: No such file or directory$"):
        token("--token-file", tmp_path / "token")
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match=r"^--token-file: \S+ is empty, must hold the token of a run$"):
        token("--token-file", tmp_path / "token")
