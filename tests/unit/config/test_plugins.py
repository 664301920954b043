import pytest

from areal_core.config.plugins import check_name, find
from areal_core.errors import ConfigError

REGISTERED = {"one": 1, "two": 2}


def test_registered_names_come_first_and_import_paths_are_followed():
    assert find("field", "two", REGISTERED) == 2
    assert find("field", "areal_core.errors:ConfigError", REGISTERED) is ConfigError


@pytest.mark.parametrize("name", ["three", "module.function", ":one", "module:", "a module:one", ""])
def test_what_is_neither_is_refused_without_importing_anything(name):
    with pytest.raises(
        ConfigError, match=r"^field: must be one of one, two, or an import path, package\.module:name, got"
    ):
        check_name("field", name, REGISTERED)


@pytest.mark.parametrize(
    ("name", "said"),
    [("no.such:thing", "No module named 'no'"), ("areal_core.errors:nothing", "has no attribute 'nothing'")],
)
def test_a_path_that_leads_nowhere_is_one_line(name, said):
    check_name("field", name, REGISTERED)
    with pytest.raises(ConfigError, match=rf"^field: {name} can't be imported: .*{said}"):
        find("field", name, REGISTERED)
