"""A language model as verifier, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from areal_core.config.groups import EnvironmentConfig
from areal_core.config.schema import load
from areal_core.environments import judge as module
from areal_core.environments.judge import LanguageModelJudge
from areal_core.environments.verdicts import Verdict
from areal_core.errors import ConfigError
from areal_core.types import Outcome, Prompt

TASK = Prompt(index=0, prompt_id="0", text="How many?", token_ids=(1,), answer="seven", row={"unit": "apples"})


@contextmanager
def serving(*replies: tuple[int, str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these, with its address and the requests that it has got; the last one again and again."""
    left, got = list(replies), list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            got.append(body | {"path": self.path, "key": self.headers.get("authorization")})
            status, text = left.pop(0) if len(left) > 1 else left[0]
            usage = {"prompt_tokens": 100, "completion_tokens": 2}
            answer = {"choices": [{"message": {"content": text}}], "usage": usage}
            self.send_response(status)
            self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode() if status == 200 else text.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def judged(
    url: str, *texts: str, monkeypatch: pytest.MonkeyPatch, at_once: bool = False, **fields: Any
) -> list[Verdict]:
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    judge = {"url": url, "model": "m", "dollars_per_million_read": 10.0, "tries": 3} | fields
    config = load({"environment": {"verifier": "judge", "judge": judge}}).environment

    async def ask() -> list[Verdict]:
        verify = LanguageModelJudge(config)
        if at_once:
            return await asyncio.gather(*(verify(TASK, text) for text in texts))
        return [await verify(TASK, text) for text in texts]

    return asyncio.run(ask())


def test_a_score_is_read_and_its_cost_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_JUDGE_KEY", "secret")
    with serving((200, "Of 2 parts one is right: 0.5"), (200, "1")) as (url, got):
        prompt = "{{ row.unit }}/{{ answer }}/{{ completion }}"
        half, whole, again = judged(url, "six", "seven", "six", monkeypatch=monkeypatch, prompt=prompt)
    assert (half.outcome, half.score, whole.outcome, whole.score) == (Outcome.INCORRECT, 0.5, Outcome.CORRECT, 1.0)
    assert half.metrics == {"judge/tokens": 102, "judge/dollars": 0.001, "judge/repeated": 0}
    assert (again.score, set(again.metrics.values())) == (0.5, {0.0})  # it was remembered
    assert [request["messages"][0]["content"] for request in got] == ["apples/seven/six", "apples/seven/seven"]
    assert {(request["path"], request["key"], request["model"]) for request in got} == {
        ("/v1/chat/completions", "Bearer secret", "m")
    }


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 0.25", 0.25),
        ("I give **1.0**.", 1.0),
        (".5", 0.5),
        ("Criterion 1: fine. Score: 0.2.", 0.2),
        ("0.8/1", None),
        ("0.3 out of 1", None),
        ("-1", None),
        ("1%", None),
        ("0 (1 error)", None),
        ("On a scale from 0 to 1, this is 0.", 0.0),
        ("I can't say", None),
    ],
)
def test_a_reply_ends_on_its_score(monkeypatch: pytest.MonkeyPatch, reply: str, score: float | None) -> None:
    """What could be another number is none."""
    with serving((200, reply)) as (url, _):
        [verdict] = judged(url, "six", monkeypatch=monkeypatch, tries=1)
    assert verdict.score == score


@pytest.mark.parametrize(
    ("replies", "requests", "said"),
    [
        ([(429, "slow down"), (503, "busy"), (200, "1.0")], 3, None),
        ([(200, "no idea"), (200, "0")], 2, None),
        ([(500, "broken")], 3, "returned no score: 500 broken"),
        ([(200, "17")], 3, "its reply '17' does not end with a number from 0 to 1"),
        ([(401, "no key")], 1, "returned no score: 401 no key"),
    ],
)
def test_what_may_pass_is_tried_again_and_what_stays_is_no_result(
    monkeypatch: pytest.MonkeyPatch, replies: list[tuple[int, str]], requests: int, said: str | None
) -> None:
    with serving(*replies) as (url, got):
        [verdict] = judged(url, "six", monkeypatch=monkeypatch)
    assert len(got) == requests
    assert (verdict.outcome is Outcome.FAILED) == (verdict.score is None) == (said is not None)
    assert said is None or said in (verdict.failure or "")


def test_a_judge_that_is_down_is_no_result_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    [verdict] = judged("http://127.0.0.1:9", "six", monkeypatch=monkeypatch)
    assert verdict.score is None
    assert (verdict.failure or "").startswith("environment.judge: http://127.0.0.1:9 returned no score: ConnectError: ")
    assert "\n" not in (verdict.failure or "")


def test_equal_requests_at_the_same_time_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving((200, "1")) as (url, got):
        verdicts = judged(url, "a", "a", "b", "a", monkeypatch=monkeypatch, at_once=True)
    assert len(got) == 2
    assert [verdict.score for verdict in verdicts] == [1.0] * 4
    assert [verdict.metrics["judge/tokens"] for verdict in verdicts] == [102, 0, 102, 0]


def test_a_request_that_takes_too_long_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for its turn costs no request its time."""
    with serving((200, "1")) as (url, _):
        found = judged(url, "a", "b", "c", monkeypatch=monkeypatch, at_once=True, requests_per_s=5.0, timeout_s=0.3)
    assert [verdict.score for verdict in found] == [1.0] * 3
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        [verdict] = judged(url, "a", monkeypatch=monkeypatch, timeout_s=0.01)
    assert (verdict.failure or "").endswith("no response within 0.01 s (environment.judge.timeout_s)")


def test_requests_keep_to_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    with serving((200, "1")) as (url, got), monkeypatch.context() as patched:
        patched.setattr(module.asyncio, "sleep", sleep)
        judged(url, "a", "b", "c", monkeypatch=monkeypatch, requests_per_s=0.01)
    assert len(got) == 3
    assert slept[0] == 0
    assert [round(seconds) for seconds in slept[1:]] == [100, 200]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"model": "m"},
            r"^environment\.judge\.url: must be set, with environment\.judge\.model, with environment\.verifier=judge$",
        ),
        ({"url": "http://a", "model": "m", "prompt": "{{ oops"}, r"^environment\.judge\.prompt: must be a Jinja "),
    ],
)
def test_settings_that_can_not_work_are_refused_by_field(fields: dict[str, str], said: str) -> None:
    config: EnvironmentConfig = load({"environment": {"verifier": "judge", "judge": fields}}).environment
    with pytest.raises(ConfigError, match=said):
        LanguageModelJudge(config)
