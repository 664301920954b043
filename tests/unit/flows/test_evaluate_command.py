"""What `make evaluate` refuses before it starts servers."""

import sys

import pytest

from flows import evaluate_command


@pytest.mark.parametrize("field", ["name", "reference"])
def test_name_that_is_too_long_is_one_line(
    field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "m", "--benchmarks", "arithmetic", f"--{field}", "x" * 300]
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    assert evaluate_command.main() == 2
    assert capsys.readouterr().err.startswith(f"areal: error: {field}: must have at most 160 bytes, got 300; shorten")
