r"""Convert unit tests of published data sets to the verifier `code`'s JSON, in one of three forms:

    {"inputs": [stdin, ...], "outputs": [stdout, ...]}               a program that reads stdin and writes stdout
    {"fn_name": f, "inputs": [[argument, ...], ...], "outputs": [result, ...]}      a function, called
    {"entry_point": f, "prompt": code, "test": code}                 a function that goes on from `prompt`, HumanEval's

| published by | the field that holds the tests | beside it |
|---|---|---|
| HumanEval | `test`, Python that defines `check(candidate)` | `prompt`, `entry_point` |
| APPS, TACO | `input_output`, JSON: {inputs, outputs, fn_name} | |
| DeepCoder | `tests`, JSON: a list of {input, output, type}, or as APPS has it | `metadata`, with `func_name` |
| LiveCodeBench | `private_test_cases`, JSON or compressed: a list of {input, output, testtype} | `metadata`, and
`public_test_cases`, which come first |
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_core.errors import ConfigError

_CHECK = "def check("  # part of HumanEval's tests
_MAX_BYTES = 2**28  # limit of inflated tests; a few compressed bytes could inflate to any size
_TEXTS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}  # opcodes around a pickled text
_STDIN = {"stdin", "stdin_stdout"}
_CALL = {"functional", "function_call"}


def unit_tests(value: object, fields: Mapping[str, object]) -> str:
    """Convert the tests in `value`, a field of the row `fields`.
    Raises ConfigError, which describes the expected content."""
    form = _human_eval(value, fields) if isinstance(value, str) and _CHECK in value else _tests(value, fields)
    try:
        return json.dumps(form)
    except TypeError as error:  # dates and bytes, which Parquet has and JSON lacks
        raise ConfigError(f"must hold tests that JSON can represent: {error}") from error


def _human_eval(test: str, fields: Mapping[str, object]) -> dict[str, object]:
    form = {"entry_point": fields.get("entry_point"), "prompt": fields.get("prompt"), "test": test}
    if not all(isinstance(text, str) and text for text in form.values()):
        needed = "entry_point (the function's name) and prompt (the start of its code)"
        raise ConfigError(f"holds tests in the HumanEval format, so the row must also have text in the fields {needed}")
    return form


def _tests(value: object, fields: Mapping[str, object]) -> dict[str, object]:
    tests = _decoded(value)
    if isinstance(tests, dict):
        return _table(tests)
    public = fields.get("public_test_cases")
    first = [] if public is None or public == value else _listed(_decoded(public))
    return _cases([*first, *_listed(tests)], fields.get("metadata"))


def _listed(tests: Any) -> list[Any]:
    if not isinstance(tests, list):
        raise ConfigError("must hold a list of tests, or an object with inputs and outputs")
    return tests


def _decoded(value: object) -> Any:
    """Parse JSON text, compressed or not. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        plain = error
    try:
        return json.loads(_unpickled(_inflated(base64.b64decode(value, validate=True))))
    except (ValueError, RecursionError, zlib.error) as error:
        wanted = "as JSON text, or as base64 of it, pickled and compressed with zlib"
        raise ConfigError(f"must hold tests {wanted}; read as JSON: {plain}; read as base64: {error}") from error


def _inflated(data: bytes) -> bytes:
    inflate = zlib.decompressobj()
    inflated = inflate.decompress(data, _MAX_BYTES)
    if inflate.unconsumed_tail:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return inflated


def _unpickled(data: bytes) -> str:
    """Extract a pickled text without executing anything. Raises ValueError for opcodes of other values."""
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _TEXTS:
            texts.append(str(argument))
        elif opcode.name not in _AROUND:
            raise ValueError(f"a pickle of other data than text ({opcode.name})")
    if len(texts) != 1:
        raise ValueError("a pickle of several texts")
    return texts[0]


def _table(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Convert tests in the format of APPS and TACO: inputs beside outputs."""
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ConfigError("must hold as many inputs as outputs, at least one")
    name = tests.get("fn_name")
    return _form(inputs, outputs, name if isinstance(name, str) and name else None)


def _cases(tests: Sequence[Any], metadata: object) -> dict[str, Any]:
    """Convert tests in the format of DeepCoder and LiveCodeBench: one object each.
    `metadata` is the row's field."""
    if not tests:
        raise ConfigError("must hold at least one test")
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
        raise ConfigError("must hold tests with an input and an output each")
    kinds = {str(test.get("testtype") or test.get("type") or "stdin") for test in tests}
    if not (kinds <= _STDIN or kinds <= _CALL):
        wanted = "one type, either stdin (stdin_stdout) or functional (function_call)"
        raise ConfigError(f"must hold tests of {wanted}, got {', '.join(sorted(kinds))}")
    name = _function_name(tests[0], metadata) if kinds <= _CALL else None
    return _form([test["input"] for test in tests], [test["output"] for test in tests], name)


def _function_name(test: Mapping[str, Any], metadata: object) -> str:
    for known, key in ((test, "fn_name"), (test.get("metadata"), "func_name"), (metadata, "func_name")):
        named = _decoded(known) if known else None
        if isinstance(named, dict) and isinstance(named.get(key), str) and named[key]:
            return named[key]
    places = "fn_name or metadata.func_name in the first test, or func_name in the row's field metadata"
    raise ConfigError(f"must name the tested function: {places}")


def _form(inputs: Sequence[Any], outputs: Sequence[Any], function_name: str | None) -> dict[str, Any]:
    if function_name is None:
        return {"inputs": [_stream(text) for text in inputs], "outputs": [_stream(text) for text in outputs]}
    calls = [_call(*test) for test in zip(inputs, outputs, strict=True)]
    results = [result for _, result in calls]
    if not isinstance(inputs[0], str) and all(isinstance(result, list) and len(result) == 1 for result in results):
        results = [result[0] for result in results]  # APPS and TACO publish the result of a call as a list of one
    return {"fn_name": function_name, "inputs": [arguments for arguments, _ in calls], "outputs": results}


def _stream(text: Any) -> str:
    """The content of stdin or stdout; some of TACO's are lists of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    if not isinstance(text, str):
        raise ConfigError("must hold inputs and outputs that are text")
    return text


def _call(arguments: Any, result: Any) -> tuple[list[Any], Any]:
    """Arguments and result of a call: as given, or parsed from LiveCodeBench's JSON, an argument a line."""
    if isinstance(arguments, list):
        return arguments, result
    if not isinstance(arguments, str) or not isinstance(result, str):
        raise ConfigError("must hold the arguments of a test as a list, or as text with one JSON value per line")
    try:
        return [json.loads(line) for line in arguments.split("\n") if line.strip()], json.loads(result)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"must hold arguments and results in JSON: {error}") from error
