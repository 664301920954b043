"""What is read of a body where it comes in."""

import numpy as np
import pytest

from areal_core.api.received import receive
from areal_core.api.wire import encode_generation
from areal_core.types import Completion
from tests.support.generation import request


def completion(tokens, finish_reason):
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish_reason=finish_reason,
    )


def test_counts_and_reasons_are_read_and_tokens_where_they_are_needed():
    completions = [completion([4, 5, 6], "stop"), completion([7, 8], "abort"), completion([], "abort")]
    body = encode_generation(request(), completions, logprobs=True)
    received = receive(body)
    assert received.body is body
    assert received.problem is None
    assert [(one.tokens, one.finish_reason) for one in received.choices] == [(3, "stop"), (2, "abort"), (0, "abort")]
    whole, begun, not_begun = (one.token_ids for one in received.choices)
    assert whole is None
    assert (begun.tolist(), begun.dtype, not_begun.tolist()) == ([7, 8], np.int32, [])


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"null", b'{"choices": [{"token_ids": "1,2"}]}', b'{"choices": null}']
)
def test_what_is_no_response_says_so(body):
    received = receive(body)
    assert received.choices == ()
    assert received.problem.startswith("not a response of /inference/v1/generate: ")
