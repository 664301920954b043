"""The bodies of requests and responses of POST /inference/v1/generate, as records and as JSON.

Fields are those of vLLM's native RL API. Servers encode, clients pass bytes on, reward workers parse.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from areal_core.errors import GenerationError, ServerLostError
from areal_core.types import FORMAT, Completion, GenerationRequest, Int32Array, PolicyVersion

MODEL_NAME = "policy"
ROUTES_VERSION = "0.32.0"  # the vLLM whose routes and fields these are
EMBEDDED = f"areal.{FORMAT}"  # what the embedded server adds to it, for what it has beyond them
ROLLOUT = "group-"  # what ids of the rollout's requests begin with: servers count their tokens apart from all others'
# The type of a response that the embedded server sends in parts, as completions end, where a client accepts it.
PARTS = "application/vnd.areal.parts"
_VERSION_NAME = re.compile(rf"{MODEL_NAME}-(\d+)-[0-9a-f]{{8,}}")
BodyPart = tuple[bytes, int]  # a response's body, and the place of a choice in it


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCompletion:
    """One completion as servers gave it, not decoded: an interrupted one has several segments."""

    segments: tuple[BodyPart, ...]
    finish_reason: str | None = None  # None: what the last segment says


@dataclass(frozen=True, slots=True)
class Arrival:
    """A finished completion of one of a group's requests."""

    request: int  # 0: the one that the group begins with; those of its environment follow, in their order
    index: int
    completion: SampledCompletion


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What a generation server does and has done: its response to GET /load."""

    running: int  # completions being decoded
    waiting: int  # completions without a slot
    generated_tokens: int  # sampled since the start, whatever became of them
    rollout_tokens: int  # of these, the ones of the rollout's requests
    completion_s: float  # completions being decoded, summed over time
    idle_s: float  # time without a running completion, unless it was paused
    paused_s: float
    swap_ms: float  # the last change of weights
    recompute_ms: float  # the last recomputation of the KV cache
    recomputed_tokens: int


def version_name(version: PolicyVersion) -> str:
    """The name of a version as a model of its own: requests for it are refused by a server that does not hold it. It
    has a part of the hash, as a version that is made again may have other weights."""
    return MODEL_NAME if version.version == 0 else f"{MODEL_NAME}-{version.version}-{version.digest[:8]}"


def encode_request(request: GenerationRequest, model: str = MODEL_NAME, cache_salt: str | None = None) -> bytes:
    """The body of a request to `model`: MODEL_NAME for whatever the server has loaded, or a version by its name. Its
    stop tokens are all that ends a completion, whatever the model's own end token is. vLLM shares cached prefixes among
    requests of one `cache_salt` alone."""
    return orjson.dumps(
        {
            "model": model,
            **({} if cache_salt is None else {"cache_salt": cache_salt}),
            "request_id": request.request_id,
            "token_ids": request.token_ids,
            "sampling_params": {
                "n": request.n,
                "max_tokens": request.max_tokens,
                "seed": request.seed,
                "temperature": 0.0 if request.greedy else request.temperature,
                "stop_token_ids": request.stop_token_ids,
                "ignore_eos": True,
                "logprobs": 0,
            },
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def encode_generation(
    request: GenerationRequest, completions: Sequence[Completion], *, indices: Sequence[int] | None = None
) -> bytes:
    """The body of a response; `indices` of the completions, if they are not all of them."""
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    numbered = zip(range(len(completions)) if indices is None else indices, completions, strict=True)
    return orjson.dumps(
        {
            "request_id": f"generate-tokens-{request.request_id}",
            "model": MODEL_NAME,
            "usage": {
                "prompt_tokens": len(request.token_ids),
                "completion_tokens": completion_tokens,
                "total_tokens": len(request.token_ids) + completion_tokens,
            },
            "choices": [_encode_choice(index, completion) for index, completion in numbered],
        }
    )


def encode_part(completions: Sequence[int], body: bytes) -> bytes:
    """A part of a response of type PARTS: a line of JSON, and a body whose choices are these completions."""
    return b"%b\n%b" % (orjson.dumps({"completions": completions, "bytes": len(body)}), body)


def encode_failure(message: str) -> bytes:
    """What ends a response of type PARTS that can't be completed."""
    return b"%b\n" % orjson.dumps({"error": message})


def parse_generation(body: bytes) -> list[Completion]:
    """The completions of a body, in order. Raises GenerationError when the body does not carry log-probabilities and
    a version for every token. A request to a version by its name has no other: what the server has loaded meanwhile,
    and labels its tokens with, does not matter."""
    try:
        response = _decoder.decode(body)
        named = _VERSION_NAME.fullmatch(response.model or "")
        return [_parse_choice(choice, None if named is None else int(named[1])) for choice in response.choices]
    except ValueError as error:  # msgspec.MsgspecError among them
        raise GenerationError(f"not a response of /inference/v1/generate: {error}") from None


def parse_part(line: bytes) -> tuple[tuple[int, ...], int]:
    """The completions of a part, and the bytes of its body, from its first line. Raises ServerLostError for a server
    that has failed, GenerationError for another line."""
    try:
        part = orjson.loads(line)
        if "error" in part:
            raise ServerLostError(str(part["error"]))
        return tuple(map(int, part["completions"])), int(part["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise GenerationError(f"not a part of a response: {type(error).__name__}: {error}") from None


def join_completions(completions: Sequence[SampledCompletion]) -> list[Completion]:
    """Completions from their segments. Raises GenerationError as `parse_generation` does."""
    bodies = {id(body): body for completion in completions for body, _ in completion.segments}
    parsed = {key: parse_generation(body) for key, body in bodies.items()}
    return [_join(completion, parsed) for completion in completions]


def _join(completion: SampledCompletion, parsed: dict[int, list[Completion]]) -> Completion:
    try:
        parts = [parsed[id(body)][index] for body, index in completion.segments]
    except IndexError:
        raise GenerationError("not a response of /inference/v1/generate: it has fewer choices than asked for") from None
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=completion.finish_reason or parts[-1].finish_reason,
    )


def version_spans(versions: Int32Array) -> list[tuple[int, int, int]]:
    """Spans of equal versions as (version, start, end), end exclusive."""
    if not len(versions):
        return []
    values = versions.tolist()
    if values.count(values[0]) == len(values):  # nearly always
        return [(values[0], 0, len(values))]
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(int(versions[start]), start, end) for start, end in itertools.pairwise(cuts)]


def _encode_choice(index: int, completion: Completion) -> dict[str, Any]:
    tokens = completion.token_ids.tolist()
    content = [
        {"token_id": token, "logprob": value} for token, value in zip(tokens, completion.logprobs.tolist(), strict=True)
    ]
    return {
        "index": index,
        "finish_reason": completion.finish_reason,
        "token_ids": tokens,
        "weight_versions": [
            {"version": str(version), "start": start, "end": end}
            for version, start, end in version_spans(completion.versions)
        ],
        "logprobs": {"content": content},
    }


class _Token(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str


class _Response(msgspec.Struct):
    choices: list[_Choice]
    model: str | None = None


_decoder = msgspec.json.Decoder(_Response)  # half the time of dictionaries


def _parse_choice(choice: _Choice, version: int | None) -> Completion:
    token_ids = np.array(choice.token_ids, dtype=np.int32)
    spans = choice.weight_versions
    versions = np.repeat(
        np.array([int(span.version) for span in spans], dtype=np.int32), [span.end - span.start for span in spans]
    )
    logprobs = np.array([token.logprob for token in choice.logprobs.content], dtype=np.float32)
    if version is not None:
        versions = np.full(len(token_ids), version, dtype=np.int32)
    if not len(token_ids) == len(logprobs) == len(versions):
        raise ValueError(f"{len(token_ids)} tokens, {len(logprobs)} log-probabilities, {len(versions)} versions")
    if not np.isfinite(logprobs).all():
        raise ValueError("log-probabilities are not finite")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice.finish_reason,
    )
