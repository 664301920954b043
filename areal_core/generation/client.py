"""Client of one generation server, vLLM's own or the embedded one: the same routes, told apart by what they can do.

An update of weights has phases: start, stage, pause, finish, resume. What becomes of running completions is the
*interruption*:

- `recompute`: they go on under the new weights, with a KV cache of those. The embedded server recomputes it in place;
  vLLM hands back what it has sampled, and the rest is requested anew (`resubmit`);
- `resubmit`: the latter, at any server;
- `keep`: they go on with keys and values of the old weights. vLLM has these in its prefix cache and can't drop them
  meanwhile; later requests name another `cache_salt`, and so don't share them;
- `wait`: the update waits for them.

Versions that are adapters (`training.lora`) vLLM holds beside the base model, each under a name of its own
(wire.version_name), and a request names the one that it wants. An update then stages the adapter, has requests name it
from now on, pauses and resumes; the one before stays until the next, for requests that are on their way. The embedded
server loads an adapter as it loads weights.
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

from areal_core.api.patience import patience
from areal_core.api.pending_completions import Received
from areal_core.api.wire import (
    EMBEDDED,
    MODEL_NAME,
    ROLLOUT,
    ROUTES_VERSION,
    ServerLoad,
    parse_generation,
    version_name,
)
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.connection import Completions, Connection, part_ids
from areal_core.generation.data_plane import DataPlane, Take, Work
from areal_core.models.verified import verified
from areal_core.tracking.timeline import Activity, TimelineWriter
from areal_core.types import Completion, GenerationRequest, PolicyVersion

_CONTROL_TIMEOUT_S = 10.0  # for what a server answers at once, or between two decode steps
_VERIFYING = ThreadPoolExecutor(1, "verify")  # one thread: what several servers load, it need not wait for in several
_METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class GenerationClient:
    """A client of one server. Every method raises ServerLostError when the server can't be reached, does not answer in
    time (in which this process could listen) or answers with a 5xx status."""

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
        """`token`: the run's token, if the server wants one. `stager`: URL of the stager on the server's machine; None
        if the server reads versions where they were published. `adapters`: versions are adapters to the base model.
        `timeline`: makes the timeline of a server that writes none. `plane`: receives and reads completions; None: this
        event loop does."""
        self.url = url
        self.stager = stager
        self.in_place = True  # it recomputes the KV cache of running completions itself; `identify` finds out
        self.resubmitted_tokens = 0  # prompts and completions begun before, prefilled here since the last update
        self._adapters = adapters
        self._model = MODEL_NAME  # that requests name
        self._update_timeout_s = update_timeout_s
        self._open: dict[str, GenerationRequest] = {}  # those of them that are in flight, by id
        self._timeline = timeline
        self._doing = Activity("wait")
        self._paused = False  # for an update
        self._paused_before_s = 0.0  # by earlier updates
        self._completion_s, self._looked = 0.0, time.monotonic()
        self._swap_ms = 0.0
        self._other_tokens = 0  # vLLM's, of requests that were not the rollout's
        self._generated_tokens = 0  # at the last look
        # Tokens, at most, of the rollout's requests: in flight, completed, and completed before the last `load`.
        self._requested = self._completed = self._reported = 0
        self._connection = Connection(url, token)
        self._plane = plane
        self._completions = Completions(url, token)

    async def identify(self) -> None:
        """Find out which kind of server it is. Raises GenerationError for one that has other routes."""
        found = orjson.loads(await self._control("GET", "/version"))["version"]
        release, _, local = found.partition("+")
        if release != ROUTES_VERSION:
            raise GenerationError(f"{self.url} runs vLLM {found}; needed is vLLM {ROUTES_VERSION}, for its RL routes")
        self.in_place = local.startswith("areal")
        if self.in_place and local != EMBEDDED:
            raise GenerationError(
                f"{self.url} has routes of {local}, needed is {EMBEDDED}: start it from the same installation"
            )
        if not self.in_place and self._timeline is not None:
            self._doing = Activity(self._doing.kind, self._timeline())

    async def generate(self, request: GenerationRequest, take: Take) -> None:
        """Have completions generated; `take` is called with completions as they end, and with the body that has them as
        its choices, in that order (wire.parse_generation reads it). Raises GenerationError when the server refuses the
        request. Waits as long as the server takes; when cancelled, the server aborts the request."""
        is_rollout = request.request_id.startswith(ROLLOUT)
        most = request.n * request.max_tokens if is_rollout else 0
        generate = self._completions.in_parts if self.in_place else self._completions.one_by_one
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
        """Do work on the loop where completions come in."""
        await (work(take) if self._plane is None else self._plane.run(work, take))

    def _counting(self, take: Take) -> Take:
        def counted(indices: tuple[int, ...], received: Received) -> None:
            self._other_tokens += sum(choice.tokens for choice in received.choices)
            take(indices, received)

        return counted

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        """The completions of a request, as `generate` gets them."""
        found: dict[int, Completion] = {}
        await self.generate(
            request,
            lambda indices, received: found.update(zip(indices, parse_generation(received.body), strict=True)),
        )
        return [found[index] for index in range(request.n)]

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with the tokens that they have; unknown ids are passed over."""
        parts: list[str] = []
        for request_id in request_ids:
            request = None if self.in_place else self._open.get(request_id)
            parts += [request_id] if request is None else part_ids(request)
        ids = [f"generate-tokens-{part}" for part in parts]  # as in responses
        await self._control("POST", "/abort_requests", {"request_ids": ids})

    @property
    def unreported_tokens(self) -> int:
        """What the server has sampled for the rollout, at most, since `load` was last asked."""
        return self._requested + self._completed - self._reported

    async def load_version(self, version: PolicyVersion, interruption: str) -> None:
        """Have the server load the weights of a version's file. Raises ServerLostError if any phase fails."""
        async with self._in_time(f"version {version.version} was not loaded"):
            if self._adapters and not self.in_place:
                await self._switch(version, interruption)
            else:
                await self._stage(await self._on_its_machine(version))
                await self._swap(version, interruption)

    async def reload(self, version: PolicyVersion) -> None:
        """Have vLLM read the base model's folder, of one file or several; with adapters it is there. Raises
        ServerLostError."""
        if self._adapters:
            await self.load_version(version, "resubmit")
            return
        async with self._in_time(f"version {version.version} was not loaded"):
            there = await self._on_its_machine(version)
            await self._check(there)
            await self._pause("resubmit")
            call = {"method": "reload_weights", "kwargs": {"weights_path": there.path}}
            await self._control("POST", "/collective_rpc", call, timeout_s=None)
            await self.label(version.version)
            await self._resume_after_update()

    async def label(self, version: int) -> None:
        """Set the version that the server reports for its weights."""
        await self._control("POST", "/update_weight_version", {"new_version": str(version)})

    async def abort_all(self) -> None:
        """End all requests with the tokens that they have; the server goes on with whatever comes next."""
        await self.pause()
        await self.resume()

    async def pause(self) -> None:
        """End all requests with the tokens that they have; what comes next waits."""
        await self._control("POST", "/pause?mode=abort&clear_cache=false")

    async def resume(self) -> None:
        await self._control("POST", "/resume")

    async def sleep(self) -> None:
        """Free the accelerator's memory until `wake_up`; running completions are aborted."""
        async with self._in_time("it was not put to sleep"):
            await self._control("POST", "/sleep?level=1&mode=abort", timeout_s=None)

    async def is_sleeping(self) -> bool:
        return bool(orjson.loads(await self._control("GET", "/is_sleeping"))["is_sleeping"])

    async def wake_up(self) -> None:
        async with self._in_time("it was not woken up"):
            await self._control("POST", "/wake_up", timeout_s=None)

    async def load(self) -> ServerLoad:
        completed = self._completed
        if self.in_place:
            load = ServerLoad(**orjson.loads(await self._control("GET", "/load", timeout_s=self._update_timeout_s)))
        else:
            load = self._vllm_load((await self._control("GET", "/metrics")).decode())
        if load.generated_tokens < self._generated_tokens:
            raise ServerLostError(f"{self.url}: it was started again")
        self._generated_tokens, self._reported = load.generated_tokens, max(self._reported, completed)
        return dataclasses.replace(load, recomputed_tokens=load.recomputed_tokens + self.resubmitted_tokens)

    async def loaded_version(self) -> int | None:
        """The version that the server reports for its weights; None when their label is no number."""
        label = orjson.loads(await self._control("GET", "/weight_info"))["weight_version"]
        return int(label) if label.isdigit() else None

    async def health(self) -> None:
        await self._control("GET", "/health")

    async def close(self) -> None:
        self._doing.end()
        await self._connection.close()
        await self._run(lambda _: self._completions.close(), lambda *_: None)

    @asynccontextmanager
    async def _in_time(self, otherwise: str) -> AsyncIterator[None]:
        """Raise ServerLostError for a server that fails what is within, refuses it or takes too long."""
        try:
            async with patience(self._update_timeout_s):
                yield
        except TimeoutError:
            raise ServerLostError(f"{self.url}: {otherwise} in {self._update_timeout_s:g} s") from None
        except ServerLostError:
            raise
        except (GenerationError, OSError) as error:
            raise ServerLostError(f"{self.url}: {otherwise}: {error}") from None

    async def _stage(self, version: PolicyVersion) -> None:
        """Have the server read the weights, while it goes on decoding."""
        await self._control("POST", "/start_weight_update")
        info = {"path": version.path, "digest": version.digest}
        await self._control("POST", "/update_weights", {"update_info": info}, timeout_s=None)
        if not self.in_place:  # vLLM reads in the background; meanwhile, no damaged file may get as far as a pause
            await self._check(version)

    async def _switch(self, version: PolicyVersion, interruption: str) -> None:
        """Have requests name an adapter, which vLLM loads while it goes on decoding; those of versions before the last
        one are unloaded."""
        name, held = version_name(version), await self._held()
        if version.version and name not in held:
            there = await self._on_its_machine(version)
            await self._check(there)
            body = {"lora_name": name, "lora_path": there.path}
            await self._control("POST", "/v1/load_lora_adapter", body, timeout_s=None)
        last, self._model = self._model, name  # before they are handed back, so that interrupted ones name it too
        await self._pause(interruption)
        await self.label(version.version)
        await self._resume_after_update()
        for old in held - {name, last, MODEL_NAME}:
            await self._control("POST", "/v1/unload_lora_adapter", {"lora_name": old})

    async def _held(self) -> set[str]:
        """The models that vLLM can be asked for."""
        return {model["id"] for model in orjson.loads(await self._control("GET", "/v1/models"))["data"]}

    async def _on_its_machine(self, version: PolicyVersion) -> PolicyVersion:
        """The version where the server can read it, brought there while it goes on decoding."""
        if self.stager is None:
            return version
        body = orjson.dumps(dataclasses.asdict(version))
        content = await self._connection.call("POST", f"{self.stager}/stage", body)
        try:
            return dataclasses.replace(version, path=orjson.loads(content)["path"])
        except (ValueError, KeyError, TypeError):
            raise GenerationError(f"{self.stager}/stage: no path in {content[:200]!r}") from None

    async def _check(self, version: PolicyVersion) -> None:
        """Raises GenerationError for a damaged file. What was brought was hashed on its way."""
        if self.stager is None:
            await asyncio.get_running_loop().run_in_executor(_VERIFYING, _verify, version)

    async def _swap(self, version: PolicyVersion, interruption: str) -> None:
        await self._pause(interruption)
        await self._control("POST", "/finish_weight_update", {"weight_version": str(version.version)}, timeout_s=None)
        await self._resume_after_update()

    async def _pause(self, interruption: str) -> None:
        """Pause generation."""
        mode = {"resubmit": "abort", "keep": "keep", "wait": "wait", "recompute": "keep" if self.in_place else "abort"}
        clear_cache = "false" if interruption == "keep" else "true"
        self.resubmitted_tokens = 0
        self._paused_before_s, self._paused = self._doing.seconds("update"), interruption != "wait"
        self._note()
        await self._control("POST", f"/pause?mode={mode[interruption]}&clear_cache={clear_cache}", timeout_s=None)
        self._paused = True
        self._completions.share_no_prefix()  # requests from now on run on the new weights
        self._note()

    async def _resume_after_update(self) -> None:
        if not self.in_place:
            await self._control("POST", "/reset_prefix_cache")
        await self._control("POST", "/resume")
        self._paused = False
        self._note()
        self._swap_ms = 1e3 * (self._doing.seconds("update") - self._paused_before_s)

    def _vllm_load(self, metrics: str) -> ServerLoad:
        """The load of a vLLM server, from its own counters and this client's clock."""
        values: dict[str, float] = {}
        for name, value in _METRIC.findall(metrics):
            values[name] = values.get(name, 0.0) + float(value)
        self._note()
        running, now = int(values.get("num_requests_running", 0)), time.monotonic()
        self._completion_s, self._looked = self._completion_s + running * (now - self._looked), now
        generated = int(values.get("generation_tokens_total", 0))
        return ServerLoad(
            running=running,
            waiting=int(values.get("num_requests_waiting", 0)),
            generated_tokens=generated,
            rollout_tokens=generated - self._other_tokens,  # vLLM does not tell whose they are
            completion_s=self._completion_s,  # as if what runs at a look had run since the one before
            idle_s=self._doing.seconds("wait"),
            paused_s=self._doing.seconds("update"),
            swap_ms=self._swap_ms,
            recompute_ms=0.0,  # what was interrupted is prefilled among other requests
            recomputed_tokens=0,
        )

    def _note(self) -> None:
        """Note what the server does from now on, as far as its client knows."""
        self._doing.note("update" if self._paused else "generate" if self._open else "wait")

    async def _control(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> bytes:
        return await self._connection.call(
            method, path, None if body is None else orjson.dumps(body), timeout_s=timeout_s
        )


def _verify(version: PolicyVersion) -> None:
    """Raises GenerationError for a file that is not what the version says, OSError for one that can't be read."""
    try:
        with verified(Path(version.path), version.digest):
            pass
    except ValueError as error:
        raise GenerationError(str(error)) from None
