"""The command-line options that every generation server has."""

from __future__ import annotations

import argparse
from pathlib import Path


def server_parser(module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--model", type=Path, required=True, help="folder in the transformers format")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--ready-file", type=Path, help="written once the server listens: its pid and URL")
    parser.add_argument("--weight-version", type=int, default=0, help="version of the weights in the folder")
    parser.add_argument("--slots", type=int, default=128, help="completions decoded at once")
    return parser
