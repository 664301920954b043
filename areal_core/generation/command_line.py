"""Command-line options that all generation servers share."""

from __future__ import annotations

import argparse
from ipaddress import ip_address
from pathlib import Path

from areal_core.errors import ConfigError


def server_parser(module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--model", type=Path, required=True, help="model folder in the transformers format")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 chooses a free one")
    parser.add_argument(
        "--token-file", type=Path, help="file with the token that every request must carry; optional on loopback"
    )
    parser.add_argument("--ready-file", type=Path, help="file to write once the server listens: its pid and URL")
    parser.add_argument(
        "--weight-version", type=int, default=0, help="policy version of the model weights in the folder"
    )
    parser.add_argument("--slots", type=int, default=128, help="number of completions decoded at once")
    return parser


def server_token(arguments: argparse.Namespace) -> str | None:
    """Return the token that requests must carry; None: any request on this machine is accepted.

    Raises ConfigError if the token is missing or unreadable.
    """
    if arguments.token_file is not None:
        return read_token(arguments.token_file)
    if not _is_loopback(arguments.host):
        raise ConfigError(f"--token-file: must be set when other machines reach the server, at {arguments.host}")
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: Path) -> str:
    """Read the token from the file of --token-file. Raises ConfigError."""
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file: can't read {file}: {error.strerror}") from None
    if not token:
        raise ConfigError(f"--token-file: {file} is empty, must hold the token of a run")
    return token
