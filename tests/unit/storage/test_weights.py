"""Published weights: complete or absent, the same bytes for the same tensors, damage noticed."""

import json
from pathlib import Path

import numpy as np
import pytest

from areal_core.errors import StorageError
from areal_core.models.tensorfile import to_bfloat16
from areal_core.storage import weights
from tests.support.lora import adapter, form
from tests.support.training import SPEC


def tensors(value: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "b.weight": np.full((2, 3), value, np.float32),
        "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    }


def test_what_is_published_is_loaded(tmp_path: Path) -> None:
    version = weights.publish(tmp_path, 7, tensors())

    assert version.path == str(tmp_path / "v000007")
    assert weights.read_manifest(tmp_path / "v000007") == version
    loaded = weights.load(version)
    assert loaded.keys() == tensors().keys()
    for name, array in tensors().items():
        np.testing.assert_array_equal(loaded[name], array)
    other = weights.publish(tmp_path, 7, tensors(2.0))  # in its place
    assert weights.load(other)["b.weight"][0, 0] == 2.0
    with pytest.raises(StorageError, match="version 7 can't be read: digest: "):
        weights.load(version)


@pytest.mark.parametrize("half", [False, True])
def test_an_adapter_is_published_in_peft_s_format_and_loaded_by_its_own_names(tmp_path: Path, half: bool) -> None:
    mine = adapter(SPEC)
    served = {name: to_bfloat16(array) for name, array in mine.items()} if half else mine
    version = weights.publish(tmp_path, 7, served, lora=form())
    folder = tmp_path / "v000007"
    assert {file.name for file in folder.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "manifest.json"
    }  # fmt: skip
    assert weights.is_whole(version)
    assert version == weights.publish(tmp_path, 7, served, lora=form())
    assert weights.weights_file(folder) == folder / "adapter_model.safetensors"
    loaded = weights.load(version)
    assert loaded.keys() == mine.keys()
    for name, array in mine.items():
        np.testing.assert_allclose(loaded[name], array, rtol=2**-8 if half else 0)
    scratch = tmp_path / "scratch"
    scratch.write_bytes(weights.weights_file(folder).read_bytes())
    adopted = weights.adopt(tmp_path / "elsewhere", 7, version.digest, scratch, form())
    assert weights.is_whole(adopted)
    there = Path(adopted.path) / "adapter_config.json"
    assert there.read_text() == (folder / "adapter_config.json").read_text()


@pytest.mark.parametrize("damage", [b"", b"other bytes"], ids=["torn", "changed"])
def test_same_weights_again_mend_a_damaged_file(tmp_path: Path, damage: bytes) -> None:
    first = weights.publish(tmp_path, 1, tensors())
    assert weights.is_whole(first)
    file = tmp_path / "v000001" / "model.safetensors"
    sound = file.read_bytes()
    file.write_bytes(damage + sound[len(damage) :] if damage else sound[:-1])
    assert not weights.is_whole(first)

    again = weights.publish(tmp_path, 1, dict(reversed(tensors().items())))

    assert again == first
    assert weights.is_whole(first)
    assert [path.name for path in sorted(file.parent.iterdir())] == ["manifest.json", "model.safetensors"]


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"version": 1, "digest": "x"})])
def test_broken_manifest_is_refused(tmp_path: Path, content: str) -> None:
    weights.publish(tmp_path, 1, tensors())
    (tmp_path / "v000001" / "manifest.json").write_text(content)

    with pytest.raises(StorageError, match="is not a valid manifest of model weights"):
        weights.read_manifest(tmp_path / "v000001")


def test_release_deletes_and_tolerates_absence(tmp_path: Path) -> None:
    weights.publish(tmp_path, 1, tensors())
    kept = weights.publish(tmp_path, 2, tensors())

    weights.release(tmp_path, [0, 1])

    assert [path.name for path in tmp_path.iterdir()] == ["v000002"]
    assert weights.newest(tmp_path) == kept
