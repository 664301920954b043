"""Updates that must fail: the client says so, and the weights that run stay as they are."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.errors import ServerLostError
from areal_core.models.verified import weights_digest
from areal_core.types import PolicyVersion
from tests.support.generation import request
from tests.support.live_servers import EXACT, deviations, get, post

NAME = "model.layers.1.mlp.up_proj.weight"
KINDS = ["no file", "damaged", "hash", "no safetensors", "shape", "missing tensor", "not finite"]


def spoil(folder, kind, published):
    """A bad version 1, made from the good one."""
    file = folder / "model.safetensors"
    tensors = load_file(f"{published.versions[1].path}/model.safetensors")
    if kind == "shape":
        tensors[NAME] = torch.zeros(3, 3)
    elif kind == "missing tensor":
        del tensors[NAME]
    elif kind == "not finite":
        tensors[NAME][0, 0] = torch.nan
    save_file(tensors, file)
    whole = weights_digest(file)
    if kind in ("damaged", "no safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    digest = {"damaged": whole, "hash": published.versions[2].digest}.get(kind, weights_digest(file))
    if kind == "no file":
        file.unlink()
    return PolicyVersion(version=1, path=str(folder), digest=digest)


@pytest.fixture
async def mended(server, client, http, published):
    """A server whose update failed is started again; here it is given a good update, which takes less time."""
    yield
    await client.abort_all()
    if server.kind == "embedded":
        assert (await post(http, "/start_weight_update"))[0] == 200
    base = published.versions[0]
    info = {"update_info": {"path": base.path, "digest": base.digest}}
    assert (await post(http, "/update_weights", info))[0] == 200
    assert (await post(http, "/finish_weight_update", {"weight_version": "0"}))[0] == 200


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("interruption", ["recompute", "keep"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bad_update_loses_the_server_and_changes_nothing(client, http, published, tmp_path, kind, interruption):
    with pytest.raises(ServerLostError, match=r"version 1|finish_weight_update"):
        await client.load_version(spoil(tmp_path, kind, published), interruption)
    if kind in ("no file", "damaged", "hash"):  # it interrupts nobody
        assert await get(http, "/is_paused") == (200, {"is_paused": False})
    assert await get(http, "/weight_info") == (200, {"weight_version": "0"})
    await client.health()
    await post(http, "/resume")
    asked = request("after", max_tokens=16, stop_token_ids=())
    [completion] = await client.complete(asked)
    assert set(completion.versions.tolist()) == {0}
    assert deviations(published.reference, asked, completion).max() < EXACT
