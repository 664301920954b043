"""A language model as verifier, behind OpenAI's chat completions API; it scores answers from 0 to 1.

    environment.verifier=judge environment.judge.url=http://127.0.0.1:8000/v1 environment.judge.model=name

Failed requests are repeated. A judge that is unreachable or gives no score means no result, never a score of 0.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import httpx
from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment

from areal_core.config.groups import EnvironmentConfig, JudgeConfig
from areal_core.environments.verdicts import Verdict
from areal_core.errors import ConfigError
from areal_core.types import Outcome, Prompt

_SCORE = re.compile(r"(?<![\w.,/+%-])(?<!of )(?<!to )(0?\.[0-9]+|0|1(?:\.0*)?)[\s.*_`]*\Z")  # at the end of a reply
_KEPT = 4096  # verdicts that a worker caches
_RETRY_S, _LONGEST_S = 0.5, 30.0  # wait before the second attempt, doubled for each later one; longest wait
_REPEATED = (408, 409, 429, *range(500, 600))  # statuses worth another attempt


class LanguageModelJudge:
    """The verifier `judge`. Raises ConfigError for incomplete or invalid settings."""

    bounded = True  # limits each request by timeout_s itself

    def __init__(self, environment: EnvironmentConfig) -> None:
        self._config = config = environment.judge
        if config.url is None or not config.model:
            raise ConfigError(
                "environment.judge.url: must be set, with environment.judge.model, with environment.verifier=judge"
            )
        key = os.environ.get(config.key_variable)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._template = SandboxedEnvironment().from_string(config.prompt)
        except TemplateError as error:
            said = f"must be a Jinja template, got {config.prompt!r}: {error}"
            raise ConfigError(f"environment.judge.prompt: {said}") from error
        self._free = asyncio.Semaphore(config.at_once)
        self._next_s = 0.0  # event-loop time of the next allowed request
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._in_flight: dict[bytes, asyncio.Event] = {}  # requests in flight; set when they have ended

    async def __call__(self, task: Prompt, completion: str) -> Verdict:
        text = self._template.render(task=task, row=task.row, answer=task.answer, completion=completion)
        name = hashlib.blake2b(text.encode(errors="surrogatepass")).digest()
        while (event := self._in_flight.get(name)) is not None:  # an equal request is in flight
            await event.wait()
        if (known := self._known.get(name)) is not None:
            self._known.move_to_end(name)
            return replace(known, metrics=dict.fromkeys(known.metrics, 0.0))  # a cached verdict costs nothing
        self._in_flight[name] = asyncio.Event()
        try:
            async with self._free:
                verdict = await self._request_verdict(text)
        finally:
            self._in_flight.pop(name).set()
        if verdict.score is not None:
            self._known[name] = verdict
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return verdict

    async def _request_verdict(self, text: str) -> Verdict:
        config, why = self._config, ""
        message = {"role": "user", "content": text}
        body = {"model": config.model, "messages": [message], "temperature": 0.0, "max_tokens": config.max_tokens}
        for attempt in range(config.tries):
            await self._wait_for_rate()
            wait_s = min(_LONGEST_S, _RETRY_S * 2**attempt)
            try:
                async with asyncio.timeout(config.timeout_s):
                    response = await self._client.post(f"{config.url}/chat/completions", json=body)
                if response.status_code == 200:
                    return _verdict(response.json(), config, attempt)
                why = f"{response.status_code} {response.text[:200]}"
                if response.status_code not in _REPEATED:
                    break
                wait_s = max(wait_s, _seconds(response.headers.get("retry-after")))
            except TimeoutError:
                why = f"no response within {config.timeout_s:g} s (environment.judge.timeout_s)"
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
            if attempt + 1 < config.tries:
                await asyncio.sleep(wait_s)
        return Verdict(Outcome.FAILED, None, failure=f"environment.judge: {config.url} returned no score: {why}")

    async def _wait_for_rate(self) -> None:
        """Wait until `requests_per_s` allows another request."""
        if self._config.requests_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        at = max(now, self._next_s)
        self._next_s = at + 1.0 / self._config.requests_per_s
        await asyncio.sleep(at - now)

    @functools.cached_property
    def _client(self) -> httpx.AsyncClient:  # created in the event loop of the first request
        return httpx.AsyncClient(headers=self._headers, timeout=None)


def _verdict(answer: dict[str, Any], config: JudgeConfig, repeated: int) -> Verdict:
    """Parse the number from 0 to 1 at the end of the judge's reply.
    Raises ValueError if there is none, and other errors for an invalid response."""
    text, used = answer["choices"][0]["message"]["content"], answer.get("usage")
    if (found := _SCORE.search(text)) is None:
        raise ValueError(f"its reply {text[:200]!r} does not end with a number from 0 to 1")
    counts = used if isinstance(used, dict) else {}
    read, written = (int(counts.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    dollars = (read * config.dollars_per_million_read + written * config.dollars_per_million_written) / 1e6
    numbers = {"judge/tokens": read + written, "judge/dollars": dollars, "judge/repeated": repeated}
    score = float(found[1])
    outcome = Outcome.CORRECT if score == 1.0 else Outcome.INCORRECT
    return Verdict(outcome, score, text.strip()[:200], metrics=numbers)


def _seconds(text: str | None) -> float:
    """Seconds of a Retry-After header, at most _LONGEST_S; 0 for none or a date."""
    try:
        return min(_LONGEST_S, max(0.0, float(text or 0.0)))
    except ValueError:
        return 0.0
