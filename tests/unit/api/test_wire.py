"""Bodies of /inference/v1/generate, and completions that are put together from several of them."""

import dataclasses

import numpy as np
import orjson
import pytest

from areal_core.api.pending_completions import PendingCompletions, receive
from areal_core.api.wire import (
    encode_failure,
    encode_generation,
    encode_part,
    encode_request,
    join_completions,
    parse_generation,
    parse_part,
    version_name,
    version_spans,
)
from areal_core.errors import GenerationError, ServerLostError
from areal_core.types import Completion, GenerationRequest, PolicyVersion, Tally

STOP = 1
REQUEST = GenerationRequest(
    request_id="r", token_ids=(7, 8, 9), n=2, max_tokens=6, seed=5, stop_token_ids=(STOP, 2), temperature=0.5
)


def completion(tokens, versions, finish_reason="stop"):
    """One whose log-probabilities say the token: -t / 7. `versions`: of its tokens, or one for all."""
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32) / 7,
        versions=np.full(len(tokens), versions, np.int32),
        finish_reason=finish_reason,
    )


COMPLETIONS = [
    completion([7, 8, 9, 1], [3, 3, 4, 6]),
    completion([2, 2], [4, 4], "length"),
    completion([], [], "abort"),
    completion([2] * 300, [4] * 299 + [5], "length"),
]


def encode(**changes):
    body = orjson.loads(encode_generation(REQUEST, COMPLETIONS))
    body["choices"][0] |= changes
    return orjson.dumps(body)


def test_completions_survive_the_wire_to_the_bit():
    parsed = parse_generation(encode_generation(REQUEST, COMPLETIONS))
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
    body = orjson.loads(encode_generation(REQUEST, COMPLETIONS))
    assert body["request_id"] == "generate-tokens-r"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 306, "total_tokens": 309}
    first = body["choices"][0]
    assert first["weight_versions"] == [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
        {"version": "6", "start": 3, "end": 4},
    ]
    assert first["logprobs"]["content"][3]["token_id"] == 1
    assert version_spans(np.zeros(0, dtype=np.int32)) == []


def test_a_request_says_all_that_sampling_depends_on():
    params = orjson.loads(encode_request(REQUEST))["sampling_params"]
    assert (params.pop("n"), params.pop("max_tokens"), params.pop("seed")) == (2, 6, 5)
    assert params == {"temperature": 0.5, "stop_token_ids": [1, 2], "ignore_eos": True, "logprobs": 0}
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
        encode(weight_versions=[{"version": "3", "start": 0, "end": 5}]),
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
    with pytest.raises(GenerationError, match="invalid part of a streamed response"):
        parse_part(b"{}")


def body(*completions, version=3):
    return encode_generation(REQUEST, [completion(tokens, version, why) for tokens, why in completions])


def take(pending, indices, content):
    pending.take(indices, receive(content))


def begun(*completions, **changes):
    pending = PendingCompletions(dataclasses.replace(REQUEST, n=len(completions), **changes))
    take(pending, range(len(completions)), body(*completions))
    return pending


def request_of(request):
    """As values that can be compared."""
    return dataclasses.replace(request, token_ids=tuple(map(int, request.token_ids)))


def joined(pending):
    return [(one.token_ids.tolist(), one.finish_reason) for one in join_completions(pending.completions())]


def test_a_continuation_asks_for_the_rest():
    pending = begun(([4, 5], "abort"), ([], "abort"))
    first, second = pending.continuation(0), pending.continuation(1)
    assert request_of(first) == dataclasses.replace(
        REQUEST, request_id="r-0-2", token_ids=(7, 8, 9, 4, 5), n=1, max_tokens=4, seed=first.seed
    )
    assert request_of(second) == dataclasses.replace(REQUEST, request_id="r-1-0", n=1, seed=second.seed)
    take(pending, [0], body(([6], "abort")))
    third = pending.continuation(0)
    assert (third.request_id, request_of(third).token_ids, third.max_tokens) == ("r-0-3", (7, 8, 9, 4, 5, 6), 3)
    take(pending, [0], body(([4, 2], "stop")))
    take(pending, [1], body(([3], "length")))
    assert joined(pending) == [([4, 5, 6, 4, 2], "stop"), ([3], "length")]


def test_the_seed_of_a_continuation_depends_on_seed_place_and_offset_alone():
    def seed(index, *tokens, **changes):
        return begun(*[(tokens, "abort")] * 2, **changes).continuation(index).seed

    seeds = [seed(0, 4, 5), seed(1, 4, 5), seed(0, 4), seed(0, 4, 5, seed=6), REQUEST.seed]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= value < 2**63 for value in seeds)
    assert seed(0, 4, 5) == seed(0, 10, 11) == seed(0, 4, 5, request_id="other")


@pytest.mark.parametrize(
    ("whole", "reason"), [([4, 1], "stop"), ([4, 2], "stop"), ([4] * 6, "length"), ([4] * 5 + [STOP], "stop")]
)
def test_completion_that_was_interrupted_after_its_stop_token_or_at_its_limit_is_finished(whole, reason):
    pending = begun((whole, "abort"), (whole[:-1], "abort"))
    assert pending.unfinished() == [1]
    take(pending, [1], body((whole[-1:], "abort")))
    assert pending.unfinished() == []
    assert joined(pending) == [(whole, reason)] * 2


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (body(([4], "abort")), "requested 2 completions, got 1"),
        (body(([4], "stop")), "requested 2 completions, got 1"),
        (body(*[([4], "abort")] * 3), "requested 2 completions, got 3"),
        (b"an abort, but not JSON", "not a response of /inference/v1/generate: .*JSON"),
        (b'{"abort": []}', "not a response of /inference/v1/generate: .*choices"),
        (b'{"choices": [{"finish_reason": "abort"}]}', "not a response of /inference/v1/generate: .*token_ids"),
        (body(([4], "abort"), ([], "length")), r"completion 1 has no token \(finish_reason length\)"),
    ],
)
def test_what_can_not_be_continued_from_is_refused(first, said):
    pending = PendingCompletions(REQUEST)
    with pytest.raises(GenerationError, match=said) as caught:
        take(pending, [0, 1], first)
    assert "\n" not in str(caught.value)
    assert not pending.begun


def test_what_was_refused_halfway_leaves_nothing_behind():
    pending = PendingCompletions(REQUEST)
    with pytest.raises(GenerationError):
        take(pending, [0, 1], body(([4, 5], "abort"), ([], "length")))
    take(pending, [0, 1], body(([6], "abort"), ([7, STOP], "stop")))
    assert joined(pending) == [([6], "abort"), ([7, STOP], "stop")]
    assert pending.sampled() == Tally(tokens=5)
    assert pending.take_discarded() == Tally(tokens=2)
    assert pending.sampled() == Tally(tokens=3)
    assert pending.take_discarded() == Tally()


def test_what_can_not_be_read_is_bounded_by_what_was_asked_for():
    pending = PendingCompletions(REQUEST)
    with pytest.raises(GenerationError):
        take(pending, [0, 1], b"no JSON")
    assert pending.sampled() == Tally(unread=2 * 6)
    pending.discard()
    assert (pending.begun, pending.sampled()) == (False, Tally(unread=2 * 6))
    take(pending, [0, 1], body(([4, 5], "abort"), ([6, STOP], "stop")))
    with pytest.raises(GenerationError):
        take(pending, [0], b"no JSON")
    assert pending.take_discarded() == Tally(unread=2 * 6 + 4)
    assert pending.sampled() == Tally(tokens=4)
