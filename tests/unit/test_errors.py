"""The text of an error is safe to print, wherever it comes from."""

import pickle

from areal_core.errors import RewardError, printable


def test_text_of_an_error_is_safe_to_print() -> None:
    error = RewardError("it said \x1b[2J\nand more \u202e, \u00e9 \u4e2d")
    assert str(error) == "it said \\x1b[2J\nand more \\u202e, \u00e9 \u4e2d"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert printable("a\nb\tc") == "a\\nb\\tc"
