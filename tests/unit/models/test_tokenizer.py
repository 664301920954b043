import pytest

from areal_core.errors import ModelError
from areal_core.models.tokenizer import CHARACTERS, EOS, PAD, Tokenizer, char_tokenizer


def test_every_character_is_a_token_and_comes_back():
    tokenizer = char_tokenizer()
    ids = tokenizer.encode(CHARACTERS)
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.vocab_size == len(CHARACTERS) + 2


def test_nothing_is_added_and_special_tokens_are_left_out_of_the_text():
    tokenizer = char_tokenizer()
    end, pad = tokenizer.token_id(EOS), tokenizer.token_id(PAD)
    assert end not in tokenizer.encode("1+1=")
    assert tokenizer.decode([*tokenizer.encode("#2"), end, pad]) == "#2"


def test_a_character_outside_the_vocabulary_is_an_error():
    with pytest.raises(Exception, match="UNK"):
        char_tokenizer().encode("1/2=")


def test_a_folder_gives_back_what_was_saved(tmp_path):
    char_tokenizer().save(tmp_path / "tokenizer.json")
    assert Tokenizer.from_folder(tmp_path).encode("1-1-7=") == char_tokenizer().encode("1-1-7=")


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
