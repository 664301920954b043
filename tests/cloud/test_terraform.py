"""The modules of infra/terraform: their form, what a scanner says of them, and their own tests, for which the provider
is mocked."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.places import FILES
from flows.provision.terraform import INFRA
from tests.support.terraform import Root

CHECKOV = FILES / ".venv-checkov" / "bin" / "checkov"
# The last file of the folder: what its tests share ends here.
pytestmark = pytest.mark.cloud


def test_all_files_are_formatted() -> None:
    assert Root(INFRA).do("fmt", "-check", "-recursive") == ""


def test_the_tests_of_the_modules_hold(tmp_path: Path) -> None:
    shutil.copytree(INFRA, tmp_path / "terraform")
    terraform = Root(tmp_path / "terraform")
    terraform.init()
    ended = terraform.run("test", "-json")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    runs = {
        (said["test_run"]["path"], said["test_run"]["run"]): said["test_run"]["status"]
        for said in lines
        if said["type"] == "test_run" and said["test_run"]["progress"] == "complete"
    }
    reasons = "\n".join(
        f"{said['@message']}: {said['diagnostic'].get('detail')}" for said in lines if said["type"] == "diagnostic"
    )
    assert set(runs.values()) == {"pass"}, reasons
    assert len(runs) == sum(path.read_text().count('\nrun "') for path in (INFRA / "tests").glob("*.tftest.hcl"))
    assert ended.returncode == 0


@pytest.mark.skipif(not CHECKOV.exists(), reason="needs checkov, which `make test-cloud` sets up")
def test_a_scanner_finds_nothing_that_is_not_explained() -> None:
    command = [str(CHECKOV), "-d", str(INFRA), "--framework", "terraform", "--skip-download", "--output", "json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300).stdout)
    results = found["results"]
    assert results["passed_checks"]
    assert [(check["check_id"], check["resource"]) for check in results["failed_checks"]] == []
    reasons = {check["check_id"]: check["check_result"]["suppress_comment"] for check in results["skipped_checks"]}
    assert [check for check, reason in reasons.items() if len(reason) < 30] == []
