"""Bodies of POST /inference/v1/generate: records, and their encoding as JSON.

The fields are those of vLLM's native RL API. Servers encode, clients pass bytes on, reward workers parse.
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
ROUTES_VERSION = "0.32.0"  # the vLLM version with these routes and fields
EMBEDDED = f"areal.{FORMAT}"  # marks the embedded server's extensions of these routes
ROLLOUT = "group-"  # id prefix of rollout requests, whose tokens servers count separately
# Media type of a response that the embedded server sends in parts, as completions end, if the client accepts it.
PARTS = "application/vnd.areal.parts"
_VERSION_NAME = re.compile(rf"{MODEL_NAME}-(\d+)-[0-9a-f]{{8,}}")
BodyPart = tuple[bytes, int]  # a response's body, and the index of a choice in it


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCompletion:
    """One completion as servers returned it, not parsed; an interrupted one has several segments."""

    segments: tuple[BodyPart, ...]
    finish_reason: str | None = None  # None: the last segment's reason


@dataclass(frozen=True, slots=True)
class Arrival:
    """A finished completion, with the request of the group that it belongs to."""

    request: int  # 0: the group's opening request; later requests of its environment follow, in order
    index: int
    completion: SampledCompletion


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Load and counters of a generation server: its response to GET /load."""

    running: int  # completions being decoded
    waiting: int  # completions without a slot
    generated_tokens: int  # sampled since the start, including discarded ones
    rollout_tokens: int  # the part of these that belongs to rollout requests
    completion_s: float  # completions being decoded, summed over time
    idle_s: float  # time without a running completion, unless it was paused
    paused_s: float
    swap_ms: float  # duration of the last load of model weights
    recompute_ms: float  # the last recomputation of the KV cache
    recomputed_tokens: int


def version_name(version: PolicyVersion) -> str:
    """Return a version's model name; servers that do not hold the version refuse requests for it.
    The name contains a part of the hash, because a version that is made again may have other model weights."""
    return MODEL_NAME if version.version == 0 else f"{MODEL_NAME}-{version.version}-{version.digest[:8]}"


def encode_request(request: GenerationRequest, model: str = MODEL_NAME, cache_salt: str | None = None) -> bytes:
    """Encode a request to `model`: MODEL_NAME for the server's current version, or the name of a version.
    Only the request's stop tokens end a completion. The model's own end token does not. vLLM shares cached prefixes
    only among requests with the same `cache_salt`."""
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
    """Encode a response; `indices` are the completions' choice indices, if they are not 0, 1, 2, ..."""
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
    """Encode a part of a PARTS response: a line of JSON, then a body whose choices are these completions."""
    return b"%b\n%b" % (orjson.dumps({"completions": completions, "bytes": len(body)}), body)


def encode_failure(message: str) -> bytes:
    """Encode the line that ends a PARTS response after a failure."""
    return b"%b\n" % orjson.dumps({"error": message})


def parse_generation(body: bytes) -> list[Completion]:
    """Parse the completions of a response, in order.
    If the body names a version, all its tokens get that version, even if the server has since loaded another.
    Raises GenerationError unless every token has a log-probability and a version."""
    try:
        response = _decoder.decode(body)
        named = _VERSION_NAME.fullmatch(response.model or "")
        return [_parse_choice(choice, None if named is None else int(named[1])) for choice in response.choices]
    except ValueError as error:  # msgspec.MsgspecError among them
        raise GenerationError(f"not a response of /inference/v1/generate: {error}") from None


def parse_part(line: bytes) -> tuple[tuple[int, ...], int]:
    """Parse the first line of a part: its completions, and its body's size in bytes.
    Raises ServerLostError if the line reports a failed server, GenerationError for any other line."""
    try:
        part = orjson.loads(line)
        if "error" in part:
            raise ServerLostError(str(part["error"]))
        return tuple(map(int, part["completions"])), int(part["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise GenerationError(f"invalid part of a streamed response: {type(error).__name__}: {error}") from None


def join_completions(completions: Sequence[SampledCompletion]) -> list[Completion]:
    """Join the segments of each completion. Raises GenerationError as `parse_generation` does."""
    bodies = {id(body): body for completion in completions for body, _ in completion.segments}
    parsed = {key: parse_generation(body) for key, body in bodies.items()}
    return [_join(completion, parsed) for completion in completions]


def _join(completion: SampledCompletion, parsed: dict[int, list[Completion]]) -> Completion:
    try:
        parts = [parsed[id(body)][index] for body, index in completion.segments]
    except IndexError:
        raise GenerationError("not a response of /inference/v1/generate: it has fewer choices than requested") from None
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=completion.finish_reason or parts[-1].finish_reason,
    )


def version_spans(versions: Int32Array) -> list[tuple[int, int, int]]:
    """Split into spans of equal versions: (version, start, end), end exclusive."""
    if not len(versions):
        return []
    values = versions.tolist()
    if values.count(values[0]) == len(values):  # the usual case
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


_decoder = msgspec.json.Decoder(_Response)  # takes half the time of a decoder to dictionaries


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
