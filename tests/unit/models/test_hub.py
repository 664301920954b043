"""Models by their name on the Hub, from its own cache; what can't be had is one line."""

import pytest
from huggingface_hub import constants

from areal_core.errors import ModelError
from areal_core.models.hub import fetch
from areal_core.models.spec import check_folder
from tests.support.models import write_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The Hub's cache, as huggingface_hub lays it out, with one model; the Hub itself is out of reach."""
    repository = tmp_path / "models--someone--tiny"
    write_tiny(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "v1").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("name", ["hub:someone/tiny", "hub:someone/tiny@v1", f"hub:someone/tiny@{COMMIT}"])
def test_what_the_cache_has_is_taken_from_it(cache, name):
    folder = fetch(name)
    assert folder.name == COMMIT
    assert check_folder(folder).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("name", ["hub:someone/other", "hub:someone/tiny@v2"])
def test_what_cannot_be_had_is_one_line(cache, name):
    with pytest.raises(
        ModelError, match=f"^{name}: it is not in the cache .* can't be reached, or must not be"
    ) as told:
        fetch(name)
    assert "\n" not in str(told.value)


def test_a_hub_that_does_not_respond_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"^hub:someone/other: ") as told:
        fetch("hub:someone/other")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["hub:tiny", "hub:a/b/c", "hub:a/b@", "hub:"])
def test_a_name_has_an_owner(name):
    with pytest.raises(ModelError, match="must be of the form hub:owner/name"):
        fetch(name)
