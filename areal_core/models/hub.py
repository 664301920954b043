"""Fetch models of the Hugging Face Hub: `hub:owner/name`, or `hub:owner/name@revision`.

A revision is a branch, a tag or a commit. The Hub's own cache (HF_HOME) keeps fetched models. With HF_HUB_OFFLINE=1, or
if the Hub can't be reached, only the cache is used.
"""

from __future__ import annotations

import re
from pathlib import Path

from areal_core.errors import ModelError, one_line

PREFIX = "hub:"
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # no weights in other formats


def fetch(path: str) -> Path:
    """Return the local folder of a Hub model, fetching it if the cache lacks it. Raises ModelError."""
    found = _NAME.fullmatch(path.removeprefix(PREFIX))
    if found is None:
        raise ModelError(f"must be of the form hub:owner/name or hub:owner/name@revision, got {path!r}")
    from huggingface_hub import snapshot_download  # importing it takes a part of a second
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(found["repository"], revision=found["revision"], allow_patterns=_FILES))
    except GatedRepoError:
        why = "its owners require you to accept their terms: accept them on its page, and set HF_TOKEN"
    except LocalEntryNotFoundError:
        why = "it is not in the cache (HF_HOME), and the Hub is unreachable or disabled (HF_HUB_OFFLINE)"
    except (HfHubHTTPError, OSError) as error:
        why = one_line(error)[:200]
    raise ModelError(f"{path}: {why}")
