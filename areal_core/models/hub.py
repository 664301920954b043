"""Models of the Hugging Face Hub: `hub:owner/name`, and `@revision` (a branch, a tag or a commit) behind it.

What was fetched once lies in the Hub's own cache (HF_HOME), which is all that is asked with HF_HUB_OFFLINE=1, or where
the Hub can't be reached.
"""

from __future__ import annotations

import re
from pathlib import Path

from areal_core.errors import ModelError, one_line

PREFIX = "hub:"
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # no weights in other formats


def fetch(path: str) -> Path:
    """The folder of a model by its name on the Hub, fetched where it isn't there yet. Raises ModelError."""
    found = _NAME.fullmatch(path.removeprefix(PREFIX))
    if found is None:
        raise ModelError(f"must be of the form hub:owner/name or hub:owner/name@revision, got {path!r}")
    from huggingface_hub import snapshot_download  # a part of a second of imports
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(found["repository"], revision=found["revision"], allow_patterns=_FILES))
    except GatedRepoError:
        why = "its owners want their terms accepted: do so on its page, and set HF_TOKEN"
    except LocalEntryNotFoundError:
        why = "it is not in the cache (HF_HOME), and the Hub can't be reached, or must not be (HF_HUB_OFFLINE)"
    except (HfHubHTTPError, OSError) as error:
        why = one_line(error)[:200]
    raise ModelError(f"{path}: {why}")
