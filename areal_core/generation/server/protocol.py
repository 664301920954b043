"""Parsing and validation of request bodies: every refusal names the field, as vLLM's errors do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from areal_core.api.wire import MODEL_NAME
from areal_core.errors import GenerationError
from areal_core.types import GenerationRequest

T = TypeVar("T")

_DEFAULT_MAX_TOKENS = 16  # vLLM's
_MAX_COMPLETIONS = 16384  # vLLM's bound on n
_TEMPERATURES = (0.01, 100.0)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Anything else would sample from another distribution than the recorded log-probabilities say, or is not built.
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "min_tokens": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logprobs": (0, None),
}
_SAMPLING_FIELDS = {"max_tokens", "temperature", "seed", "n", "stop_token_ids", "ignore_eos", *_NEUTRAL}
_FIELDS = {"model", "token_ids", "sampling_params", "request_id", "stream"}


class RequestError(GenerationError):
    """A request that is answered with an error: its status and the field that is to blame."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGeneration:
    """A request and what its response is to contain."""

    request: GenerationRequest  # its stop tokens include the model's end tokens, unless the client ignores those
    logprobs: bool


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def take(values: dict[str, Any], name: str, kind: type[T]) -> T:
    """A required field of one type."""
    return _checked(values, name, lambda value: isinstance(value, kind), _KINDS[kind])


def parse_version(values: dict[str, Any], name: str) -> int:
    return int(_checked(values, name, _is_label, "a whole number as text"))


def parse_request(
    body: dict[str, Any], *, eos_token_ids: tuple[int, ...], default_id: str, version: str = MODEL_NAME
) -> WantedGeneration:
    """A request from its body; `version` is the name of the one that is loaded. Raises RequestError for unknown names,
    wrong types and settings that are not served."""
    _refuse_unknown(body, _FIELDS)
    model = body.get("model", MODEL_NAME)
    if model not in (None, MODEL_NAME, version):
        held = f"{MODEL_NAME!r}" + (f" and {version!r}" if version != MODEL_NAME else "")
        raise RequestError(f"the model {model!r:.80} does not exist, this is {held}", param="model", status=404)
    _checked(body, "stream", lambda value: not value, "false: responses are sent whole")
    request_id = take({"request_id": default_id, **body}, "request_id", str)
    params = take({"sampling_params": {}, **body}, "sampling_params", dict)
    _refuse_unknown(params, _SAMPLING_FIELDS)
    for name, neutral in _NEUTRAL.items():
        if name in params and (isinstance(params[name], bool) or params[name] not in neutral):
            raise RequestError(f"must be {neutral[0]} or left out, got {params[name]!r:.80}", param=name)
    low, high = _TEMPERATURES
    wanted = f"from {low:g} to {high:g} or, for greedy decoding, 0"
    temperature = float(_checked(params, "temperature", _is_temperature, wanted, 1.0))
    ignore_eos = _checked(params, "ignore_eos", lambda value: isinstance(value, bool), "true or false", False)
    stop_token_ids = _tokens(params, "stop_token_ids") if params.get("stop_token_ids") is not None else ()
    seed = _checked(params, "seed", lambda value: value is None or _is_int(value), "a whole number")
    completions = f"a whole number from 1 to {_MAX_COMPLETIONS}"
    request = GenerationRequest(
        request_id=request_id,
        token_ids=_tokens(body, "token_ids"),
        n=_checked(params, "n", lambda value: _is_count(value, _MAX_COMPLETIONS), completions, 1),
        max_tokens=_checked(params, "max_tokens", _is_count, "a whole number of at least 1", _DEFAULT_MAX_TOKENS),
        seed=int(default_id, 16) if seed is None else seed,  # without one no two requests may sample alike
        stop_token_ids=stop_token_ids if ignore_eos else tuple(dict.fromkeys((*stop_token_ids, *eos_token_ids))),
        greedy=temperature == 0,
        temperature=temperature or 1.0,
    )
    return WantedGeneration(request=request, logprobs=params.get("logprobs") is not None)


_KINDS: dict[type, str] = {str: "text", list: "a list", dict: "an object"}


def _refuse_unknown(values: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(values.keys() - known)
    if unknown:
        raise RequestError(f"not supported; known are {', '.join(sorted(known))}", param=", ".join(unknown))


def _checked(
    values: dict[str, Any], name: str, is_valid: Callable[[Any], bool], wanted: str, default: Any = None
) -> Any:
    """A field, or its default for null too. Raises RequestError for one that is not what is `wanted`."""
    value = default if values.get(name) is None else values[name]
    if not is_valid(value):
        raise RequestError(f"must be {wanted}, got {value!r:.80}", param=name)
    return value


def _tokens(values: dict[str, Any], name: str) -> tuple[int, ...]:
    tokens = take(values, name, list)
    if not all(map(_is_int, tokens)):
        raise RequestError("must be a list of whole numbers", param=name)
    return tuple(tokens)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_label(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit()


def _is_temperature(value: object) -> bool:
    low, high = _TEMPERATURES
    return isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or low <= value <= high)
