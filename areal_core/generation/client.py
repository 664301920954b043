"""Client of one generation server: vLLM's own or the embedded one, which have the same routes.

An update of model weights has phases: start, stage, pause, finish, resume. The *interruption* says what happens to
running completions:

- `recompute`: they continue under the new weights with a new KV cache. The embedded server recomputes the cache in
  place. vLLM returns the sampled tokens, and the controller requests the rest again (as in `resubmit`).
- `resubmit`: any server returns the sampled tokens, and the controller requests the rest again.
- `keep`: they continue with keys and values of the old weights. vLLM keeps these in its prefix cache and can't drop
  them meanwhile. Later requests name another `cache_salt`, so they don't share them.
- `wait`: the update waits for them.

With `training.lora`, versions are adapters. vLLM holds adapters beside the base model, each under its own name
(wire.version_name), and each request names one. An update stages the adapter, makes later requests name it, pauses and
resumes. The previous adapter stays until the next update, for requests in flight. The embedded server loads an adapter
like model weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from areal_core.api import wire
from areal_core.api.patience import lag_tolerant_timeout
from areal_core.api.pending_completions import Received
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.connection import Completions, Connection, part_ids
from areal_core.generation.data_plane import DataPlane, Take, Work
from areal_core.models.verified import verified
from areal_core.tracking.timeline import Activity, TimelineWriter
from areal_core.types import Completion, GenerationRequest, PolicyVersion

_CONTROL_TIMEOUT_S = 10.0  # for responses that come at once or between two decode steps
_VERIFYING = ThreadPoolExecutor(1, "verify")  # one thread, because several servers load the same version
_METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class GenerationClient:
    """A client of one generation server.

    Every method raises ServerLostError if the server can't be reached, responds too late or answers with a 5xx status.
    Only time in which this process could listen counts.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        stager: str | None = None,
        adapters: bool = False,
        update_timeout_s: float = 120.0,
        timeline: Callable[[], TimelineWriter] | None = None,
        plane: DataPlane | None = None,
    ) -> None:
        """`token`: the run's token, if the server requires one.

        `stager`: URL of the stager on the server's machine; None if the server reads versions where they were
        published. `adapters`: versions are adapters to the base model. `timeline`: makes the timeline of a server that
        writes none. `plane`: receives and reads completions; None: this event loop does.
        """
        self.url = url
        self.stager = stager
        self.in_place = True  # whether the server recomputes running completions' KV cache; set by `identify`
        self.resubmitted_tokens = 0  # tokens of interrupted requests prefilled here since the last update
        self._adapters = adapters
        self._model = wire.MODEL_NAME  # the model named in requests
        self._update_timeout_s = update_timeout_s
        self._open: dict[str, GenerationRequest] = {}  # requests in flight, by id
        self._timeline = timeline
        self._activity = Activity("wait")
        self._paused = False  # paused for an update
        self._paused_before_s = 0.0  # seconds paused by earlier updates
        self._completion_s, self._counted_at = 0.0, time.monotonic()
        self._swap_ms = 0.0
        self._other_tokens = 0  # tokens that vLLM sampled for requests outside the rollout
        self._generated_tokens = 0  # at the last `load`
        # Upper bounds of the rollout's tokens: in flight, completed, and completed before the last `load`.
        self._requested = self._completed = self._reported = 0
        self._connection = Connection(url, token)
        self._plane = plane
        self._completions = Completions(url, token)

    async def identify(self) -> None:
        """Find out which kind of server it is. Raises GenerationError for a server with other routes."""
        found = orjson.loads(await self._control("GET", "/version"))["version"]
        release, _, local = found.partition("+")
        if release != wire.ROUTES_VERSION:
            raise GenerationError(f"{self.url} runs vLLM {found}, must be vLLM {wire.ROUTES_VERSION} for its RL routes")
        self.in_place = local.startswith("areal")
        if self.in_place and local != wire.EMBEDDED:
            raise GenerationError(
                f"{self.url} has routes of {local}, must be {wire.EMBEDDED}: start it from the same installation"
            )
        if not self.in_place and self._timeline is not None:
            self._activity = Activity(self._activity.kind, self._timeline())

    async def generate(self, request: GenerationRequest, take: Take) -> None:
        """Generate completions, and call `take` with their indices and the body that holds them, as they end.

        The body has them as choices in that order (wire.parse_generation reads it). Waits as long as the server needs.
        If cancelled, the server aborts the request. Raises GenerationError if the server refuses the request.
        """
        is_rollout = request.request_id.startswith(wire.ROLLOUT)
        most = request.n * request.max_tokens if is_rollout else 0
        generate = self._completions.stream if self.in_place else self._completions.request_each
        self._open[request.request_id] = request
        self._requested += most
        self._note()
        try:
            await self._run(
                functools.partial(generate, request, self._model), take if is_rollout else self._counting(take)
            )
        finally:
            self._open.pop(request.request_id, None)
            self._requested -= most
            self._completed += most
            self._note()

    async def _run(self, work: Work, take: Take) -> None:
        """Run work on the event loop that receives completions."""
        await (work(take) if self._plane is None else self._plane.run(work, take))

    def _counting(self, take: Take) -> Take:
        def counted(indices: tuple[int, ...], received: Received) -> None:
            self._other_tokens += sum(choice.tokens for choice in received.choices)
            take(indices, received)

        return counted

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        """Generate a request's completions and return them all. Raises as `generate`."""
        found: dict[int, Completion] = {}
        await self.generate(
            request,
            lambda indices, received: found.update(zip(indices, wire.parse_generation(received.body), strict=True)),
        )
        return [found[index] for index in range(request.n)]

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with their tokens so far; unknown ids are ignored."""
        parts: list[str] = []
        for request_id in request_ids:
            request = None if self.in_place else self._open.get(request_id)
            parts += [request_id] if request is None else part_ids(request)
        ids = [f"generate-tokens-{part}" for part in parts]  # ids as in responses
        await self._control("POST", "/abort_requests", {"request_ids": ids})

    @property
    def unreported_tokens(self) -> int:
        """Upper bound of tokens that the server has sampled for the rollout since the last `load`."""
        return self._requested + self._completed - self._reported

    async def load_version(self, version: PolicyVersion, interruption: str) -> None:
        """Make the server load a version's model weights. Raises ServerLostError if any phase fails."""
        async with self._in_time(f"version {version.version} was not loaded"):
            if self._adapters and not self.in_place:
                await self._switch(version, interruption)
            else:
                await self._stage(await self._local_version(version))
                await self._swap(version, interruption)

    async def reload(self, version: PolicyVersion) -> None:
        """Make vLLM load the base model's folder again. Raises ServerLostError.

        With adapters the server already has the base model, so only the version is loaded.
        """
        if self._adapters:
            await self.load_version(version, "resubmit")
            return
        async with self._in_time(f"version {version.version} was not loaded"):
            there = await self._local_version(version)
            await self._check(there)
            await self._pause("resubmit")
            call = {"method": "reload_weights", "kwargs": {"weights_path": there.path}}
            await self._control("POST", "/collective_rpc", call, timeout_s=None)
            await self.label(version.version)
            await self._resume_after_update()

    async def label(self, version: int) -> None:
        """Set the version that the server reports."""
        await self._control("POST", "/update_weight_version", {"new_version": str(version)})

    async def abort_all(self) -> None:
        """End all requests with their tokens so far; the server continues with later requests."""
        await self.pause()
        await self.resume()

    async def pause(self) -> None:
        """End all requests with their tokens so far; later requests wait."""
        await self._control("POST", "/pause?mode=abort&clear_cache=false")

    async def resume(self) -> None:
        await self._control("POST", "/resume")

    async def sleep(self) -> None:
        """Free the accelerator's memory until `wake_up`; running completions are aborted."""
        async with self._in_time("/sleep did not finish"):
            await self._control("POST", "/sleep?level=1&mode=abort", timeout_s=None)

    async def is_sleeping(self) -> bool:
        return bool(orjson.loads(await self._control("GET", "/is_sleeping"))["is_sleeping"])

    async def wake_up(self) -> None:
        async with self._in_time("/wake_up did not finish"):
            await self._control("POST", "/wake_up", timeout_s=None)

    async def load(self) -> wire.ServerLoad:
        completed = self._completed
        if self.in_place:
            answer = await self._control("GET", "/load", timeout_s=self._update_timeout_s)
            load = wire.ServerLoad(**orjson.loads(answer))
        else:
            load = self._vllm_load((await self._control("GET", "/metrics")).decode())
        if load.generated_tokens < self._generated_tokens:
            raise ServerLostError(f"{self.url}: the server has restarted")
        self._generated_tokens, self._reported = load.generated_tokens, max(self._reported, completed)
        return dataclasses.replace(load, recomputed_tokens=load.recomputed_tokens + self.resubmitted_tokens)

    async def loaded_version(self) -> int | None:
        """Return the version that the server reports; None if its label is no number."""
        label = orjson.loads(await self._control("GET", "/weight_info"))["weight_version"]
        return int(label) if label.isdigit() else None

    async def health(self) -> None:
        await self._control("GET", "/health")

    async def close(self) -> None:
        self._activity.end()
        await self._connection.close()
        await self._run(lambda _: self._completions.close(), lambda *_: None)

    @asynccontextmanager
    async def _in_time(self, otherwise: str) -> AsyncIterator[None]:
        """Context manager: raises ServerLostError if the server fails, refuses the request or takes too long."""
        try:
            async with lag_tolerant_timeout(self._update_timeout_s):
                yield
        except TimeoutError:
            raise ServerLostError(f"{self.url}: {otherwise} within {self._update_timeout_s:g} s") from None
        except ServerLostError:
            raise
        except (GenerationError, OSError) as error:
            raise ServerLostError(f"{self.url}: {otherwise}: {error}") from None

    async def _stage(self, version: PolicyVersion) -> None:
        """Make the server read the model weights while it continues decoding."""
        await self._control("POST", "/start_weight_update")
        info = {"path": version.path, "digest": version.digest}
        await self._control("POST", "/update_weights", {"update_info": info}, timeout_s=None)
        if not self.in_place:  # vLLM reads in the background; check here, so that a damaged file causes no pause
            await self._check(version)

    async def _switch(self, version: PolicyVersion, interruption: str) -> None:
        """Load an adapter into vLLM beside decoding, name it in later requests, unload all but the last two."""
        models = orjson.loads(await self._control("GET", "/v1/models"))["data"]
        name, held = wire.version_name(version), {model["id"] for model in models}
        if version.version and name not in held:
            there = await self._local_version(version)
            await self._check(there)
            body = {"lora_name": name, "lora_path": there.path}
            await self._control("POST", "/v1/load_lora_adapter", body, timeout_s=None)
        last, self._model = self._model, name  # before the pause, so that interrupted requests name it too
        await self._pause(interruption)
        await self.label(version.version)
        await self._resume_after_update()
        for old in held - {name, last, wire.MODEL_NAME}:
            await self._control("POST", "/v1/unload_lora_adapter", {"lora_name": old})

    async def _local_version(self, version: PolicyVersion) -> PolicyVersion:
        """Return the version with its path on the server's machine, after the stager has fetched it."""
        if self.stager is None:
            return version
        body = orjson.dumps(dataclasses.asdict(version))
        content = await self._connection.call("POST", f"{self.stager}/stage", body)
        try:
            return dataclasses.replace(version, path=orjson.loads(content)["path"])
        except (ValueError, KeyError, TypeError):
            raise GenerationError(f"{self.stager}/stage: no path in {content[:200]!r}") from None

    async def _check(self, version: PolicyVersion) -> None:
        """Raise GenerationError for a damaged file. A stager has already checked the versions that it fetched."""
        if self.stager is None:
            await asyncio.get_running_loop().run_in_executor(_VERIFYING, _verify, version)

    async def _swap(self, version: PolicyVersion, interruption: str) -> None:
        await self._pause(interruption)
        await self._control("POST", "/finish_weight_update", {"weight_version": str(version.version)}, timeout_s=None)
        await self._resume_after_update()

    async def _pause(self, interruption: str) -> None:
        """Pause generation for an update."""
        mode = {"resubmit": "abort", "keep": "keep", "wait": "wait", "recompute": "keep" if self.in_place else "abort"}
        clear_cache = "false" if interruption == "keep" else "true"
        self.resubmitted_tokens = 0
        self._paused_before_s, self._paused = self._activity.seconds("update"), interruption != "wait"
        self._note()
        await self._control("POST", f"/pause?mode={mode[interruption]}&clear_cache={clear_cache}", timeout_s=None)
        self._paused = True
        self._completions.share_no_prefix()  # later requests run on the new weights
        self._note()

    async def _resume_after_update(self) -> None:
        if not self.in_place:
            await self._control("POST", "/reset_prefix_cache")
        await self._control("POST", "/resume")
        self._paused = False
        self._note()
        self._swap_ms = 1e3 * (self._activity.seconds("update") - self._paused_before_s)

    def _vllm_load(self, metrics: str) -> wire.ServerLoad:
        """Compute the load of a vLLM server from its counters and this client's clock."""
        values: dict[str, float] = {}
        for name, value in _METRIC.findall(metrics):
            values[name] = values.get(name, 0.0) + float(value)
        self._note()
        running, now = int(values.get("num_requests_running", 0)), time.monotonic()
        self._completion_s, self._counted_at = self._completion_s + running * (now - self._counted_at), now
        generated = int(values.get("generation_tokens_total", 0))
        return wire.ServerLoad(
            running=running,
            waiting=int(values.get("num_requests_waiting", 0)),
            generated_tokens=generated,
            rollout_tokens=generated - self._other_tokens,  # vLLM does not count requests separately
            completion_s=self._completion_s,  # assumes that the current number ran since the last call
            idle_s=self._activity.seconds("wait"),
            paused_s=self._activity.seconds("update"),
            swap_ms=self._swap_ms,
            recompute_ms=0.0,  # interrupted completions are prefilled among other requests
            recomputed_tokens=0,
        )

    def _note(self) -> None:
        """Record the server's activity from now on, as far as its client knows."""
        self._activity.note("update" if self._paused else "generate" if self._open else "wait")

    async def _control(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> bytes:
        return await self._connection.call(
            method, path, None if body is None else orjson.dumps(body), timeout_s=timeout_s
        )


def _verify(version: PolicyVersion) -> None:
    """Raise GenerationError for a file that doesn't match the version, OSError for an unreadable one."""
    try:
        with verified(Path(version.path), version.digest):
            pass
    except ValueError as error:
        raise GenerationError(str(error)) from None
