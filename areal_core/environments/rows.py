"""Rows of files, one after the other: JSON lines, a JSON list, Parquet, or a data set of the `datasets` library.

The only user of pyarrow and datasets, each imported when a file needs it. Nothing is fetched: of a data set of the
Hugging Face Hub, what this machine has in its cache is read.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.errors import ConfigError

_CACHED = "datasets:"  # what the name of a data set of the Hub begins with
_BATCH = 1024  # rows of a Parquet file that are in memory at once


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it stands, and its fields, or what keeps it from having any."""

    place: str  # "line 7", "row 7"; the first is 1
    fields: Mapping[str, object] = field(default_factory=dict)
    wrong: str | None = None


def read_rows(name: str, path: str) -> Iterator[Row]:
    """The rows of a file, of a folder that `save_to_disk` has written, or of `datasets:owner/name[:config]:split`.
    `name` is the setting that holds the path, with which a ConfigError begins where nothing can be read."""
    try:
        if path.startswith(_CACHED):
            yield from _numbered(_cached(path.removeprefix(_CACHED)))
        elif Path(path).is_dir():
            yield from _numbered(_saved(path))
        elif path.endswith(".parquet"):
            yield from _numbered(_parquet(path))
        elif path.endswith(".json"):
            yield from _numbered(_listed(path))
        else:
            yield from _lines(path)
    except ConfigError as error:
        raise ConfigError(f"{name}: {path} {error}") from error
    except Exception as error:  # whatever pyarrow and datasets raise for files that are broken
        raise ConfigError(f"{name}: can't read {path}: {_first_line(error)}") from error


def _lines(path: str) -> Iterator[Row]:
    """One JSON object a line; a line that is none says so, and empty ones are left out."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _row(f"line {number}", line)


def _row(place: str, line: bytes) -> Row:
    try:
        return _object(place, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Row(place, wrong=f"not UTF-8: {error}")
    except (ValueError, RecursionError) as error:  # json's own, numbers of too many digits, brackets without end
        return Row(place, wrong=f"not JSON: {_first_line(error)}")


def _object(place: str, value: object) -> Row:
    return Row(place, value) if isinstance(value, dict) else Row(place, wrong="must be a JSON object")


def _listed(path: str) -> list[Any]:
    try:
        rows = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"must be JSON, or end on .jsonl if it holds an object a line: {error}") from error
    if not isinstance(rows, list):
        raise ConfigError("must hold a list of JSON objects")
    return rows


def _numbered(rows: Iterable[object]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield _object(f"row {number}", row)


def _parquet(path: str) -> Iterator[Mapping[str, object]]:
    from pyarrow import parquet  # a third of a second of imports

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH):
            yield from batch.to_pylist()


def _saved(path: str) -> Iterable[Any]:
    import datasets  # more than a second of imports

    found = datasets.load_from_disk(path)
    if isinstance(found, datasets.DatasetDict):
        splits = ", ".join(f"{path.rstrip('/')}/{split}" for split in found)
        raise ConfigError(f"holds several splits; name one of them: {splits}")
    return found


def _cached(named: str) -> Iterable[Any]:
    import datasets
    from datasets import config as settings

    parts = named.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ConfigError("must be of the form datasets:owner/name:split, or datasets:owner/name:config:split")
    name, *config, split = parts
    settings.HF_HUB_OFFLINE = True  # what a run is fed does not change between its starts
    try:
        return datasets.load_dataset(name, *config, split=split)
    except Exception as error:
        call = f"datasets.load_dataset({', '.join(map(repr, parts[:-1]))})"
        raise ConfigError(f"is not in the cache of this machine, which {call} fills: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
