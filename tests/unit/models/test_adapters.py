"""Adapters: which layers have one, what it is at first, what merging makes of it, and files that peft reads."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_core.errors import ModelError
from areal_core.models.adapters import (
    ADAPTER,
    init_adapter,
    merged,
    read_adapter,
    read_lora,
    write_adapter,
    write_adapter_config,
)
from areal_core.models.folders import write_model
from areal_core.models.spec import read_arrays
from areal_core.models.tensorfile import write_tensors
from areal_core.types import Lora
from tests.support.lora import adapter, by_peft, form
from tests.support.training import SPEC, weights

TWO = Lora(rank=2, alpha=8.0, targets=("q_proj", "down_proj"))


def test_a_fresh_adapter_adds_nothing_and_is_a_function_of_the_seed() -> None:
    fresh = init_adapter(SPEC, TWO, 3)
    base = {name: tensor.numpy() for name, tensor in weights().items()}
    whole = merged(base, fresh, TWO)
    assert whole.keys() == base.keys()
    assert all((whole[name] == array).all() for name, array in base.items())
    downs = [array for name, array in fresh.items() if "lora_A" in name]
    assert all(0 < np.abs(array).max() <= array.shape[1] ** -0.5 for array in downs)
    again, other = init_adapter(SPEC, TWO, 3), init_adapter(SPEC, TWO, 4)
    assert all((again[name] == array).all() for name, array in fresh.items())
    assert any((other[name] != array).any() for name, array in fresh.items())


def test_merged_weights_and_files_are_what_peft_makes_of_them(tmp_path: Path) -> None:
    write_model(tmp_path / "base", SPEC, weights(), None)
    mine = adapter(SPEC, TWO)
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter" / ADAPTER, mine, TWO)
    write_adapter_config(tmp_path / "adapter", TWO)
    found = by_peft(tmp_path / "base", tmp_path / "adapter").merge_and_unload().state_dict()
    changed = 0
    for name, array in merged(read_arrays(tmp_path / "base", SPEC), mine, TWO).items():
        torch.testing.assert_close(torch.from_numpy(array), found[name], rtol=0, atol=1e-6)
        changed += int((array != weights()[name].numpy()).any())
    assert changed == 2 * SPEC.layers


def test_a_written_adapter_is_read_again(tmp_path: Path) -> None:
    mine, file = adapter(SPEC, TWO), tmp_path / ADAPTER
    written = write_adapter(file, mine, TWO)
    assert read_lora(file) == TWO
    found = read_adapter(file, SPEC, TWO)
    assert found.keys() == mine.keys()
    assert all((found[name] == array).all() for name, array in mine.items())
    other = write_adapter(file, mine, dataclasses.replace(TWO, alpha=16.0))
    assert other.digest != written.digest  # what it adds is another
    write_tensors(file, {"a": np.zeros(1, np.float32)})
    assert read_lora(file) is None


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / ADAPTER
    write_adapter(file, adapter(SPEC, TWO), TWO)
    for spec, targets, said in (
        (dataclasses.replace(SPEC, hidden_size=8), TWO.targets, r"q_proj.lora_A.weight: expected shape \[2, 8\], got"),
        (SPEC, ("c_attn",), "training.lora.targets: must name linear layers"),
        (SPEC, ("q_proj",), "down_proj.lora_A.weight: no such tensor in this model"),
    ):
        with pytest.raises(ModelError, match=f"adapter of another one: .*{said}"):
            read_adapter(file, spec, dataclasses.replace(TWO, targets=targets))


@pytest.mark.parametrize(
    ("base", "name", "revision"),
    [("", None, None), ("hub:me/it", "me/it", None), ("hub:me/it@v1", "me/it", "v1"), ("/a/it@v1", "/a/it@v1", None)],
)
def test_peft_reads_the_configuration(tmp_path: Path, base: str, name: str | None, revision: str | None) -> None:
    from peft import PeftConfig

    write_adapter_config(tmp_path, form(), base)
    found = PeftConfig.from_pretrained(str(tmp_path))
    assert (found.base_model_name_or_path, found.revision) == (name, revision)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (values["peft_type"], values["r"], values["lora_alpha"]) == ("LORA", 3, 12.0)
    assert values["target_modules"] == list(form().targets)
