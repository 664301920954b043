"""Bodies of /inference/v1/generate: what is encoded is parsed back exactly, what is damaged is refused."""

import dataclasses

import numpy as np
import orjson
import pytest

from areal_core.api.wire import (
    encode_failure,
    encode_generation,
    encode_part,
    encode_request,
    parse_generation,
    parse_part,
    version_name,
    version_spans,
)
from areal_core.errors import GenerationError, ServerLostError
from areal_core.types import Completion, GenerationRequest, PolicyVersion

REQUEST = GenerationRequest(request_id="r-1", token_ids=(3, 4), n=2, max_tokens=8, seed=5, stop_token_ids=(1,))


def completion(tokens, versions, finish_reason="stop"):
    logprobs = -np.random.default_rng(len(tokens)).exponential(size=len(tokens)).astype(np.float32)
    return Completion(
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=logprobs,
        versions=np.array(versions, dtype=np.int32),
        finish_reason=finish_reason,
    )


COMPLETIONS = [
    completion([7, 8, 9, 1], [3, 3, 4, 6]),
    completion([2, 2], [4, 4], "length"),
    completion([], [], "abort"),
    completion([2] * 300, [4] * 299 + [5], "length"),
]


def encode(**changes):
    body = orjson.loads(encode_generation(REQUEST, COMPLETIONS, logprobs=True, eos_token_ids=(1,)))
    body["choices"][0] |= changes
    return orjson.dumps(body)


def test_completions_survive_the_wire_to_the_bit():
    parsed = parse_generation(encode_generation(REQUEST, COMPLETIONS, logprobs=True, eos_token_ids=(1,)))
    assert len(parsed) == len(COMPLETIONS)
    for got, sent in zip(parsed, COMPLETIONS, strict=True):
        for field in ("token_ids", "logprobs", "versions"):
            assert getattr(got, field).dtype == getattr(sent, field).dtype
            np.testing.assert_array_equal(getattr(got, field), getattr(sent, field))
        assert got.finish_reason == sent.finish_reason


def test_a_version_that_was_asked_for_by_name_is_that_of_every_token():
    """vLLM labels tokens with what it has loaded last."""
    version = PolicyVersion(version=12, path="/v", digest="ab12cd34" * 8)
    name = version_name(version)
    assert name == "policy-12-ab12cd34"
    assert orjson.loads(encode_request(REQUEST, name))["model"] == name
    body = orjson.loads(encode()) | {"model": name}
    for got, sent in zip(parse_generation(orjson.dumps(body)), COMPLETIONS, strict=True):
        np.testing.assert_array_equal(got.versions, np.full(len(sent.token_ids), 12))
    assert version_name(dataclasses.replace(version, version=0)) == "policy"
    assert version_name(dataclasses.replace(version, digest="0" * 64)) != name


def test_fields_are_those_of_vllm():
    body = orjson.loads(encode_generation(REQUEST, COMPLETIONS, logprobs=True, eos_token_ids=(1,)))
    assert body["request_id"] == "generate-tokens-r-1"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 306, "total_tokens": 308}
    first = body["choices"][0]
    assert first["weight_versions"] == [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
        {"version": "6", "start": 3, "end": 4},
    ]
    assert first["logprobs"]["content"][3]["token_id"] == 1
    assert first["stop_reason"] is None
    without = orjson.loads(encode_generation(REQUEST, COMPLETIONS, logprobs=False, eos_token_ids=()))["choices"]
    assert [choice["stop_reason"] for choice in without] == [1, None, None, None]  # a stop token of the request
    assert without[0]["logprobs"] is None
    assert version_spans(np.zeros(0, dtype=np.int32)) == []


def test_a_request_says_all_that_sampling_depends_on():
    params = orjson.loads(encode_request(REQUEST))["sampling_params"]
    assert (params.pop("n"), params.pop("max_tokens"), params.pop("seed")) == (2, 8, 5)
    assert params == {"temperature": 1.0, "stop_token_ids": [1], "ignore_eos": True, "logprobs": 0}
    greedy = dataclasses.replace(REQUEST, greedy=True)
    assert orjson.loads(encode_request(greedy))["sampling_params"]["temperature"] == 0.0


@pytest.mark.parametrize(
    "body",
    [
        b"not JSON",
        b"[]",
        b"{}",
        encode(logprobs=None),
        encode(weight_versions=None),
        encode(weight_versions=[{"version": "3", "start": 0, "end": 3}]),
        encode(weight_versions=[{"version": "default", "start": 0, "end": 4}]),
        encode(logprobs={"content": [{"token_id": 1, "logprob": -1.0}]}),
        encode(logprobs={"content": [{"token_id": 1, "logprob": None}] * 4}),
        encode(token_ids="abcd"),
    ],
)
def test_bodies_without_a_logprob_and_a_version_for_every_token_are_refused(body):
    with pytest.raises(GenerationError, match="not a response"):
        parse_generation(body)


def test_parts_of_a_response_tell_whose_they_are_and_how_it_ends():
    line, body = encode_part([0, 2], b"a body").split(b"\n")
    assert (parse_part(line), body) == (((0, 2), 6), b"a body")
    with pytest.raises(ServerLostError, match=r"^no memory$"):
        parse_part(encode_failure("no memory"))
    with pytest.raises(GenerationError, match="not a part of a response"):
        parse_part(b"{}")
