import pytest

from areal_core.config.schema import EnvironmentConfig, RunConfig, TaskConfig
from areal_core.environments.registry import open_environment, open_verifier, verifier_name
from areal_core.environments.verifiers import exact_match, mathematics
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import char_tokenizer


def opened(**settings):
    return open_environment(RunConfig(environment=EnvironmentConfig(**settings)), char_tokenizer())


def test_a_verifier_is_chosen_by_the_configuration_and_defaults_to_the_tasks_own():
    arithmetic, rows = TaskConfig(name="arithmetic"), TaskConfig(name="rows")
    assert open_verifier(EnvironmentConfig(), arithmetic) is exact_match
    assert open_verifier(EnvironmentConfig(), rows) is mathematics
    assert open_verifier(EnvironmentConfig(verifier="exact_match"), rows) is exact_match
    path = "areal_core.environments.verifiers:mathematics"
    assert open_verifier(EnvironmentConfig(verifier=path), arithmetic) is mathematics


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"name": "three_turn"},
            r"environment\.name: must be one of single_turn, two_turn, or an import path, .*got .three_turn",
        ),
        (
            {"verifier": "areal_core.types:nothing"},
            r"environment\.verifier: areal_core\.types:nothing can't be imported",
        ),
        ({"name": "two_turn", "retry_message": "again!"}, r"environment: the model's tokenizer can't spell 'again!'"),
    ],
)
def test_an_unknown_environment_or_verifier_is_refused_by_field(settings, said):
    with pytest.raises(ConfigError, match=said):
        opened(**settings)


def test_a_task_of_ones_own_says_who_judges_it():
    own = TaskConfig(name="my_task:Opposites")
    with pytest.raises(ConfigError, match=r"^environment\.verifier: must be given, who judges my_task:Opposites\?$"):
        verifier_name(EnvironmentConfig(), own)
    assert verifier_name(EnvironmentConfig(verifier="exact_match"), own) == "exact_match"
