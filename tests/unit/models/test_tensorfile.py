"""Tensor files: what the safetensors library reads, hashed as written, bfloat16 as torch rounds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from areal_core.errors import ModelError
from areal_core.models import tensorfile, vectors
from areal_core.models.tensorfile import as_float32, mapped_tensors, to_bfloat16, write_tensors

TENSORS = {
    "rng": np.arange(7, dtype=np.uint8),
    "b": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    "a": np.array([True, False]),
    "scalar": np.float32(3.5).reshape(()),
    "empty": np.zeros((0, 4), np.float32),
    "long": np.array([2**40, -1]),
}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    written = write_tensors(tmp_path / "t", TENSORS)
    data = (tmp_path / "t").read_bytes()
    assert (written.bytes, written.digest) == (len(data), blake3(data).hexdigest())
    for found in (load_file(tmp_path / "t"), mapped_tensors(tmp_path / "t")):
        assert found.keys() == TENSORS.keys()
        for name, array in TENSORS.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


def test_bfloat16_is_rounded_as_torch_rounds_and_written_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorfile, "_PIECE", 1000)
    monkeypatch.setattr(tensorfile, "_WRITTEN", 300)
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    values = bits.view(np.float32)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8]  # the last two are ties
    bits[6:8] = 0x7F800001, 0xFFFFFFFF  # not numbers, which stay so
    assert (to_bfloat16(values)[6:8] == 0x7FC0).all()
    write_tensors(tmp_path / "t", {"w": to_bfloat16(values), "n": np.array([1, 2])})
    expected = torch.from_numpy(values).bfloat16()
    found = load_torch(tmp_path / "t")
    assert found["w"].dtype == torch.bfloat16
    assert found["n"].tolist() == [1, 2]
    torch.testing.assert_close(found["w"], expected, rtol=0, atol=0, equal_nan=True)
    np.testing.assert_array_equal(as_float32(mapped_tensors(tmp_path / "t")["w"]), expected.float().numpy())


def test_numbers_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    save_torch({"w": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "t")
    with pytest.raises(ModelError, match=r"t: w must be of .*F32.*, got F8_E4M3"):
        mapped_tensors(tmp_path / "t")


def test_the_kernel_cache_depends_on_the_intrinsics(monkeypatch):
    """They end up inside of functions of other files, whose own text is all that numba compares."""

    def twice(x):
        return 2 * x

    keys = []
    for source in ("one", "one", "another"):
        monkeypatch.setattr(vectors, "_SOURCE", source)
        function = vectors.compiled("int64(int64)")(twice)
        assert function(4) == 8
        keys.append(function._cache._index_key(function.signatures[0], function.targetctx.codegen()))
    assert keys[0] == keys[1] != keys[2]
