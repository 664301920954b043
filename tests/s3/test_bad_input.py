"""What a user of Ceph's gateway did wrong is one line that names the field, before anything is started or lost."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from areal_core.__main__ import main
from areal_core.errors import StorageError
from areal_core.storage.objects import Storage
from tests.support.radosgw import RadosGateway

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def guest(radosgw: RadosGateway) -> dict[str, str]:
    """The credentials of somebody who may make no bucket."""
    return radosgw.add_user("guest", "--max-buckets", "-1")


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, str]], None]:
    """Have boto find these credentials, and no others on this machine."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    def act(credentials: dict[str, str]) -> None:
        for name, value in credentials.items():
            monkeypatch.setenv(name, value)

    return act


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], str]:
    """The one line of a run that is refused its store."""

    def refused(url: str, endpoint_url: str) -> str:
        arguments = (f"state_dir={tmp_path}/state", "task.held_out=8", f"storage.url={url}")
        assert main([*arguments, f"storage.endpoint_url={endpoint_url}"]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert not (tmp_path / "state" / "runs").exists()
        return line.removeprefix("areal: error: ")

    return refused


def _url() -> str:
    return f"s3://areal-{uuid.uuid4().hex}/runs"


@pytest.mark.parametrize(
    ("who", "line"),
    [
        ("nobody", "can't use URL at SERVER: Unable to locate credentials"),
        ("guest", "can't use URL at SERVER: AccessDenied"),
        ("wrong secret", "can't write URL/.probe-\\w+: the credentials are wrong \\(SignatureDoesNotMatch\\)"),
        ("wrong key", "can't write URL/.probe-\\w+: the credentials are wrong \\(InvalidAccessKeyId\\)"),
    ],
)
def test_who_may_not_write(radosgw: RadosGateway, guest: Any, refused: Any, as_user: Any, who: str, line: str) -> None:
    users = {
        "nobody": {},
        "guest": guest,
        "wrong secret": radosgw.credentials | {"AWS_SECRET_ACCESS_KEY": "wrong"},
        "wrong key": radosgw.credentials | {"AWS_ACCESS_KEY_ID": "nobody"},
    }
    as_user(users[who])
    url, at = _url(), radosgw.endpoint_url
    said = line.replace("URL", re.escape(url)).replace("SERVER", re.escape(at))
    assert re.fullmatch(rf"storage\.url: {said}", refused(url, at))


def test_what_may_not_be_deleted_is_said(radosgw: RadosGateway, guest: Any, as_user: Any) -> None:
    """S3 answers a deletion of several objects with 200 and tells in it what it has refused."""
    as_user(radosgw.credentials)
    bucket = f"areal-{uuid.uuid4().hex}"
    kept = Storage.open(f"s3://{bucket}/runs", radosgw.endpoint_url)
    kept.put_bytes("kept/one", b"1")
    allow = {"Effect": "Allow", "Action": ["s3:*"], "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]}
    deny = {"Effect": "Deny", "Action": ["s3:DeleteObject"], "Resource": [f"arn:aws:s3:::{bucket}/runs/kept/*"]}
    everybody = {"Principal": {"AWS": ["arn:aws:iam:::user/guest"]}}
    owner = fsspec.filesystem("s3", endpoint_url=radosgw.endpoint_url, skip_instance_cache=True)
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allow | everybody, deny | everybody]})
    owner.call_s3("put_bucket_policy", Bucket=bucket, Policy=policy)
    as_user(guest)
    store = Storage.open(f"s3://{bucket}/runs", radosgw.endpoint_url)
    with pytest.raises(StorageError, match=rf"^storage\.url: can't delete s3://{bucket}/runs/kept: .*AccessDenied"):
        store.delete("kept")
    assert list(store.list()) == ["kept/one"]
