"""Parsing of requests; refusals are tested through the server."""

import orjson
import pytest

from areal_core.api.wire import encode_request
from areal_core.generation.server.protocol import RequestError, parse_request
from areal_core.types import GenerationRequest


def parse(body):
    return parse_request(orjson.loads(orjson.dumps(body)), eos_token_ids=(1, 2), default_id="ff")


@pytest.mark.parametrize(
    "changes",
    [
        *({"stop_token_ids": stop, "greedy": greedy} for stop in ((), (1,), (5, 6)) for greedy in (False, True)),
        *({"stop_token_ids": (), "temperature": temperature} for temperature in (0.01, 0.6, 1, 100)),
    ],
)
def test_a_request_survives_the_wire(changes):
    sent = GenerationRequest(request_id="r", token_ids=(3, 4), n=3, max_tokens=9, seed=2**60, **changes)
    wanted = parse_request(orjson.loads(encode_request(sent)), eos_token_ids=(1, 2), default_id="ff")
    assert wanted.request == sent
    assert wanted.logprobs


def test_defaults_are_those_of_vllm():
    wanted = parse({"token_ids": [3]})
    assert wanted.request == GenerationRequest(
        request_id="ff", token_ids=(3,), n=1, max_tokens=16, seed=0xFF, stop_token_ids=(1, 2)
    )
    assert not wanted.logprobs


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"top_k": 5}, r"top_k: must be 0 or left out, got 5$"),
        *(
            ({"temperature": value}, r"temperature: must be from 0\.01 to 100 or, for greedy decoding, 0, got")
            for value in (0.009, 101, -1, True, "0.5", 1e400)
        ),
    ],
)
def test_an_error_names_its_field(params, said):
    with pytest.raises(RequestError, match=f"^{said}") as raised:
        parse_request({"token_ids": [3], "sampling_params": params}, eos_token_ids=(), default_id="ff")
    assert (raised.value.param, raised.value.status) == (*params, 400)
