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
def test_a_cached_model_is_taken_from_the_cache(cache, name):
    folder = fetch(name)
    assert folder.name == COMMIT
    assert check_folder(folder).architecture == "Qwen2ForCausalLM"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "offline", "said"),
    [
        ("hub:someone/other", True, "hub:someone/other: it is not in the cache .* the Hub is unreachable or disabled"),
        ("hub:someone/tiny@v2", True, "hub:someone/tiny@v2: it is not in the cache .* is unreachable"),
        ("hub:someone/other", False, "hub:someone/other: "),
        *(
            (name, True, ".*must be of the form hub:owner/name")
            for name in ("hub:tiny", "hub:a/b/c", "hub:a/b@", "hub:")
        ),
    ],
)
def test_a_model_that_can_not_be_fetched_is_one_line(monkeypatch, name, offline, said):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=f"^{said}") as told:
        fetch(name)
    assert "\n" not in str(told.value)
