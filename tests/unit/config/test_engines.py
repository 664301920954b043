"""Engines state what they can do, and nobody asks for their names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_core.config.engines import GENERATION_ENGINES, TRAINING_ENGINES, GenerationTraits, TrainingTraits
from areal_core.config.plugins import check_name
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.training.engines.registry import _ENGINES

ROOT = Path(__file__).resolve().parents[3]
NAMES = GENERATION_ENGINES.keys() | TRAINING_ENGINES.keys()


def sharded() -> None: ...


def serving() -> None: ...


def confused() -> None: ...


def plain() -> None: ...


sharded.traits = TrainingTraits(shards=True)
serving.traits = GenerationTraits(any_model=False)
confused.traits = GenerationTraits()


def trained_by(engine: str, **training: int) -> RunConfig:
    return load({"training": {"engine": f"{__name__}:{engine}", **training}})


def test_an_engine_of_ones_own_states_its_capabilities() -> None:
    assert trained_by("sharded", zero_stage=3).zero_stage == 3
    assert load({"training": {"engine": "deepspeed", "zero_stage": 1}}).zero_stage == 1
    assert trained_by("plain").zero_stage == load({}).zero_stage == 0
    assert trained_by("plain").training_traits == TrainingTraits()
    config = load({"generation": {"engine": f"{__name__}:serving"}})
    assert not config.generation_traits.any_model


def test_capabilities_of_another_kind_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^training\.engine: the traits of .*:confused must be a TrainingTraits, got Gen"
    ):
        _ = trained_by("confused").training_traits


def test_loading_a_configuration_imports_no_engine() -> None:
    config = load({"generation": {"engine": "no.such:one"}, "training": {"engine": "no.such:other"}})
    with pytest.raises(ConfigError, match=r"^training.engine: no.such:other can't be imported: "):
        _ = config.training_traits


def test_every_registered_engine_has_capabilities() -> None:
    assert _ENGINES.keys() == TRAINING_ENGINES.keys()


def compared(path: Path) -> Iterator[str]:
    """Where a module compares something with the name of an engine."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare | ast.Match):
            held = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            if held & NAMES:
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_module_compares_names_of_engines() -> None:
    found = [
        place for part in ("areal_core", "flows") for file in (ROOT / part).rglob("*.py") for place in compared(file)
    ]
    assert not found, "ask for a capability of areal_core.config.engines"


REGISTERED = {"one": 1, "two": 2}


@pytest.mark.parametrize("name", ["three", "module.function", ":one", "module:", "a module:one", ""])
def test_what_is_neither_is_refused_without_importing_anything(name):
    with pytest.raises(
        ConfigError, match=r"^field: must be one of one, two, or an import path, package\.module:name, got"
    ):
        check_name("field", name, REGISTERED)
