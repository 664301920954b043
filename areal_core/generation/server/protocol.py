"""Request bodies as msgspec records. Every error names the field, as vLLM's errors do."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from areal_core.api.wire import MODEL_NAME
from areal_core.errors import GenerationError
from areal_core.types import GenerationRequest

T = TypeVar("T")
Label = Annotated[str, Meta(pattern=r"^[0-9]{1,18}$")]  # label of a version: a whole number as text
_FIELD = re.compile(r"field `(?P<known>\w+)`|at `\$(?:\.\w+)*?\.(?P<at>\w+)(?:\[[^\]]*\])?`$")


class Sampling(Struct, forbid_unknown_fields=True):
    """How completions are sampled.

    vLLM's other fields are refused: they are not built, or would sample from another distribution than that of the
    recorded log-probabilities.
    """

    n: Annotated[int, Meta(ge=1, le=16384)] = 1  # vLLM's bound
    max_tokens: Annotated[int, Meta(ge=1)] = 16  # vLLM's default
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None  # None: a random seed
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0  # 0: greedy
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # the model's end tokens then do not stop a completion
    logprobs: Literal[0] | None = None  # they are always sent


class Generate(Struct, forbid_unknown_fields=True):
    """A request for completions."""

    token_ids: tuple[int, ...]
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    model: str | None = None
    request_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))


class Abort(Struct):
    """Ids of the requests to abort: those in responses, as in vLLM, or the requests' own."""

    request_ids: list[str]


class WeightsFile(Struct):
    """Path and hash of a version's model weights."""

    path: str
    digest: str


class Update(Struct):
    """The model weights to stage."""

    update_info: WeightsFile


class Finish(Struct):
    """The version of the staged model weights."""

    weight_version: Label


class Relabel(Struct):
    """The version to report from now on."""

    new_version: Label


class RequestError(GenerationError):
    """A request that the server answers with an error: HTTP status and the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.status = status


def parse(body: bytes, kind: type[T]) -> T:
    """Parse a body as a record. Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        raise RequestError(str(error), param=found and found[found.lastgroup or 0]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body must be JSON: {error}") from None


def parse_request(body: bytes, *, eos_token_ids: tuple[int, ...], version: str = MODEL_NAME) -> GenerationRequest:
    """Parse a request for completions. `version` is the name of the loaded version.

    Raises RequestError for unknown names, wrong types and unsupported settings.
    """
    asked = parse(body, Generate)
    if asked.model not in (None, MODEL_NAME, version):
        held = f"{MODEL_NAME!r}" + (f" and {version!r}" if version != MODEL_NAME else "")
        raise RequestError(
            f"the model {asked.model!r:.80} does not exist; this server has {held}", param="model", status=404
        )
    params = asked.sampling_params
    if 0 < params.temperature < 0.01:  # a smaller temperature may overflow the logits
        raise RequestError("must be 0, or from 0.01 to 100", param="temperature")
    ends = () if params.ignore_eos else eos_token_ids
    return GenerationRequest(
        request_id=asked.request_id,
        token_ids=asked.token_ids,
        n=params.n,
        max_tokens=params.max_tokens,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))),
        greedy=params.temperature == 0,
        temperature=params.temperature or 1.0,
    )
