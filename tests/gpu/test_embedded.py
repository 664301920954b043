"""The embedded engine on a GPU: log-probabilities of what it samples are transformers' there."""

import dataclasses

import pytest
import torch

from tests.support.generation import SPECS, Reference, request, weights
from tests.support.offline import OfflineEngine, gathered


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return dataclasses.replace(SPECS[request.param], context=512)


@pytest.fixture(autouse=True)
def full_precision():
    """Float32 products, not TF32's: the comparison is to 1e-4."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_logprobs_across_an_update_are_those_of_transformers(spec, tmp_path):
    reference = Reference(tmp_path, spec, {0: 1, 1: 2})
    engine = OfflineEngine(spec, weights(spec, 1), slots=32, device="cuda")
    asked = [request(f"r{i}", range(2, 5 + i), n=4, max_tokens=400, seed=i, stop_token_ids=()) for i in range(8)]
    for item in asked:
        engine.add(item)
    ended = [done for _ in range(100) for done in engine.step()]
    assert not ended
    engine.swap(engine.prepare(weights(spec, 2)), 1)
    while engine.running or engine.waiting:
        ended += engine.step()
    completions = gathered(ended)
    for item in asked:
        assert len(completions[item.request_id]) == item.n
        for completion in completions[item.request_id]:
            assert set(completion.versions.tolist()) == {0, 1}
            reference.check(item, completion)


def test_the_same_seed_gives_the_same_completion(spec):
    engine = OfflineEngine(spec, weights(spec, 1), slots=32, device="cuda", deterministic=True)
    asked = request("r", n=2, max_tokens=100, seed=3, stop_token_ids=())
    [alone] = engine.generate([asked])
    [among, *_] = engine.generate([asked, *(request(f"o{i}", n=4, max_tokens=60, seed=i) for i in range(6))])
    for one, other in zip(alone, among, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
