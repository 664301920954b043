"""Client of one generation server, vLLM's own or the embedded one: the same routes, told apart by what they can do.

An update of weights has phases: start, stage, pause, finish, resume. What becomes of running completions is the
*interruption*:

- `recompute`: they go on under the new weights, with a KV cache of those. The embedded server recomputes it in place;
  vLLM hands back what it has sampled, and the rest is requested anew (`resubmit`);
- `resubmit`: the latter, at any server;
- `keep`: they go on with keys and values of the old weights;
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
from typing import Any

import aiohttp
import orjson

from areal_core.api.access import authorization
from areal_core.api.patience import patience
from areal_core.api.wire import (
    EMBEDDED,
    MODEL_NAME,
    PARTS,
    ROLLOUT,
    ROUTES_VERSION,
    ServerLoad,
    completion_tokens,
    encode_request,
    parse_generation,
    parse_part,
    version_name,
)
from areal_core.errors import GenerationError, ServerLostError
from areal_core.models.spec import weights_sha256
from areal_core.tracking.timeline import Activity, TimelineWriter
from areal_core.types import Completion, GenerationRequest, PolicyVersion

_KEEP_ALIVE_S = 2.0  # vLLM closes a connection after 5 s of silence; a request sent just then would have it taken out
_CONTROL_TIMEOUT_S = 10.0  # for what a server answers at once, or between two decode steps
_HASHING = ThreadPoolExecutor(1, "sha256")  # one thread: of the servers that load a version, the first has it hashed
_METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

Take = Callable[[tuple[int, ...], bytes], None]
"""Is given completions of a request, by their indices, and the body that has them as its choices, in that order."""


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
    ) -> None:
        """`token` is the run's, where the server wants one; `stager` is the URL of what brings versions onto the
        server's machine, None where it reads them where they were published; `adapters`: versions are adapters to the
        base model; `timeline` makes the timeline of a server that writes none itself."""
        self.url = url
        self.stager = stager
        self.in_place = True  # it recomputes the KV cache of running completions itself; `identify` finds out
        self.resubmitted_tokens = 0  # prompts and completions begun before, prefilled here since the last update
        self._adapters = adapters
        self._model = MODEL_NAME  # that requests name
        self._update_timeout_s = update_timeout_s
        self._calls = 0  # requests in flight
        self._parts: dict[str, list[str]] = {}  # of those that vLLM gets as several: their ids
        self._timeline = timeline
        self._doing = Activity("wait")
        self._paused = False  # for an update
        self._paused_before_s = 0.0  # by earlier updates
        self._completion_s, self._looked = 0.0, time.monotonic()
        self._swap_ms = 0.0
        self._prefill = (0.0, 0.0)  # vLLM's: seconds, requests
        self._other_tokens = 0  # vLLM's, of requests that were not the rollout's
        self._generated_tokens = 0  # at the last look
        # Tokens, at most, of the rollout's requests: in flight, completed, and completed before the last `load`.
        self._requested = self._completed = self._reported = 0
        # Without a bound on connections: requests wait at the server, which schedules them.
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers=authorization(token),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            # Nor with time limits of its own, which this process' own lag would exceed.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )

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
        self._calls += 1
        self._requested += most
        self._note()
        try:
            if self.in_place:
                await self._generate_in_parts(request, take)
            else:
                await self._generate_one_by_one(request, take, counted=is_rollout)
        finally:
            self._calls -= 1
            self._requested -= most
            self._completed += most
            self._note()

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        """The completions of a request, as `generate` gets them."""
        found: dict[int, Completion] = {}
        await self.generate(
            request, lambda indices, body: found.update(zip(indices, parse_generation(body), strict=True))
        )
        return [found[index] for index in range(request.n)]

    async def _generate_in_parts(self, request: GenerationRequest, take: Take) -> None:
        """As the embedded server sends them."""
        headers = {"Content-Type": "application/json", "Accept": PARTS}
        body, missing = encode_request(request, self._model), request.n
        async with self._answered("POST", "/inference/v1/generate", body, headers) as response:
            while missing and (line := await response.content.readline()):
                indices, size = parse_part(line)
                take(indices, await response.content.readexactly(size))
                missing -= len(indices)
        if missing:
            raise ServerLostError(f"{self.url}: the response to {request.request_id} ended early")

    async def _generate_one_by_one(self, request: GenerationRequest, take: Take, *, counted: bool) -> None:
        """A request for each completion: vLLM makes as many of one, with these seeds, and answers when all have ended.
        Its prefix cache computes their prompt once."""

        async def one(index: int) -> None:
            alone = dataclasses.replace(request, request_id=_part_id(request, index), n=1, seed=request.seed + index)
            asked = encode_request(alone, self._model)
            body = await self._call("POST", "/inference/v1/generate", asked, timeout_s=None)
            if not counted:
                self._other_tokens += completion_tokens(body)
            take((index,), body)

        self._parts[request.request_id] = [_part_id(request, index) for index in range(request.n)]
        try:
            # What one of them meets does not concern the others, whose completions are worth having.
            outcomes = await asyncio.gather(*map(one, range(request.n)), return_exceptions=True)
        finally:
            del self._parts[request.request_id]
        for error in outcomes:
            if error is not None:
                raise error

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with the tokens that they have; unknown ids are passed over."""
        parts = [part for request_id in request_ids for part in self._parts.get(request_id, [request_id])]
        ids = [f"generate-tokens-{part}" for part in parts]  # as in responses
        await self._control("POST", "/abort_requests", {"request_ids": ids})

    @property
    def unreported_tokens(self) -> int:
        """What the server has sampled for the rollout, at most, since `load` was last asked."""
        return self._requested + self._completed - self._reported

    async def load_version(self, version: PolicyVersion, interruption: str) -> None:
        """Have the server load the weights of a version's file. Raises ServerLostError if any phase fails."""
        async with self._update(version):
            if self._adapters and not self.in_place:
                await self._switch(version, interruption)
            else:
                await self._stage(await self._on_its_machine(version))
                await self._swap(version, interruption)

    async def reload(self, version: PolicyVersion) -> None:
        """Have vLLM read a version's folder itself, where weights usually come another way; with adapters the base
        model is there. Raises ServerLostError."""
        if self._adapters:
            await self.load_version(version, "resubmit")
            return
        async with self._update(version):
            there = await self._on_its_machine(version)
            await self._check(there)
            await self._pause("resubmit")
            call = {"method": "reload_weights", "kwargs": {"weights_path": there.path}}
            await self._control("POST", "/collective_rpc", call, timeout_s=None)
            await self.label(version.version)
            await self._resume_after_update("resubmit")

    async def open_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the group of the trainer, which sends weights itself from now on. Raises ServerLostError."""
        await self._within("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def close_transfer(self) -> None:
        """Leave the group of the trainer that was joined before. Raises ServerLostError."""
        await self._within("POST", "/shutdown_weight_transfer_engine", None)

    async def begin_transfer(self, version: PolicyVersion, interruption: str) -> None:
        """Pause generation and have the server get ready for weights. Raises ServerLostError."""
        async with self._update(version):
            await self._pause(interruption)
            await self._control("POST", "/start_weight_update")

    async def receive(self, update_info: Any) -> None:
        """Take weights that the trainer is sending; returns when they have come. Raises ServerLostError."""
        await self._within("POST", "/update_weights", {"update_info": update_info})

    async def end_transfer(self, version: PolicyVersion, interruption: str) -> None:
        """Load the weights that have come and resume generation. Raises ServerLostError."""
        async with self._update(version):
            await self._finish(version, interruption)

    async def world_size(self) -> int:
        """Processes that hold the model, all of which take part in a transfer."""
        return int(orjson.loads(await self._control("GET", "/get_world_size"))["world_size"])

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
        await self._within("POST", "/sleep?level=1&mode=abort", None)

    async def is_sleeping(self) -> bool:
        return bool(orjson.loads(await self._control("GET", "/is_sleeping"))["is_sleeping"])

    async def wake_up(self) -> None:
        await self._within("POST", "/wake_up", None)

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
        await self._session.close()

    @asynccontextmanager
    async def _update(self, version: PolicyVersion) -> AsyncIterator[None]:
        """Raise ServerLostError for a server that fails an update, refuses it or takes too long."""
        try:
            async with patience(self._update_timeout_s):
                yield
        except TimeoutError:
            raise ServerLostError(
                f"{self.url}: version {version.version} was not loaded in {self._update_timeout_s:g} s"
            ) from None
        except ServerLostError:
            raise
        except (GenerationError, OSError) as error:
            raise ServerLostError(f"{self.url}: version {version.version} was not loaded: {error}") from None

    async def _within(self, method: str, path: str, body: object) -> None:
        try:
            await self._control(method, path, body, timeout_s=self._update_timeout_s)
        except ServerLostError:
            raise
        except GenerationError as error:
            raise ServerLostError(str(error)) from None

    async def _stage(self, version: PolicyVersion) -> None:
        """Have the server read the weights, while it goes on decoding."""
        await self._control("POST", "/start_weight_update")
        info = {"path": version.path, "sha256": version.sha256}
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
        await self._resume_after_update(interruption)
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
        content = await self._call("POST", f"{self.stager}/stage", body, timeout_s=None)
        try:
            return dataclasses.replace(version, path=str(orjson.loads(content)["path"]))
        except (ValueError, KeyError, TypeError):
            raise GenerationError(f"{self.stager}/stage names no path") from None

    async def _check(self, version: PolicyVersion) -> None:
        """Raises GenerationError for a damaged file. What was brought was hashed on its way."""
        if self.stager is None:
            await asyncio.get_running_loop().run_in_executor(_HASHING, _check_weights, version)

    async def _swap(self, version: PolicyVersion, interruption: str) -> None:
        await self._pause(interruption)
        await self._finish(version, interruption)

    async def _pause(self, interruption: str) -> None:
        """Pause generation."""
        mode = {"resubmit": "abort", "keep": "keep", "wait": "wait", "recompute": "keep" if self.in_place else "abort"}
        clear_cache = "false" if interruption == "keep" else "true"
        self.resubmitted_tokens = 0
        self._paused_before_s, self._paused = self._doing.seconds("update"), interruption != "wait"
        self._note()
        await self._control("POST", f"/pause?mode={mode[interruption]}&clear_cache={clear_cache}", timeout_s=None)
        self._paused = True
        self._note()

    async def _finish(self, version: PolicyVersion, interruption: str) -> None:
        """Swap the weights and resume generation, which is paused."""
        await self._control("POST", "/finish_weight_update", {"weight_version": str(version.version)}, timeout_s=None)
        await self._resume_after_update(interruption)

    async def _resume_after_update(self, interruption: str) -> None:
        if not self.in_place and interruption != "keep":
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
        prefill = (
            values.get("request_prefill_time_seconds_sum", 0.0),
            values.get("request_prefill_time_seconds_count", 0),
        )
        (spent_s, prefills), self._prefill = (prefill[0] - self._prefill[0], prefill[1] - self._prefill[1]), prefill
        return ServerLoad(
            running=running,
            waiting=int(values.get("num_requests_waiting", 0)),
            generated_tokens=generated,
            rollout_tokens=generated - self._other_tokens,  # vLLM does not tell whose they are
            completion_s=self._completion_s,  # as if what runs at a look had run since the one before
            idle_s=self._doing.seconds("wait"),
            paused_s=self._doing.seconds("update"),
            swap_ms=self._swap_ms,
            recompute_ms=1e3 * spent_s / prefills if prefills else 0.0,  # a request's mean, since the last look
            recomputed_tokens=0,
        )

    def _note(self) -> None:
        """Note what the server does from now on, as far as its client knows."""
        self._doing.note("update" if self._paused else "generate" if self._calls else "wait")

    async def _control(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> bytes:
        return await self._call(method, path, None if body is None else orjson.dumps(body), timeout_s=timeout_s)

    async def _call(self, method: str, path: str, body: bytes | None, *, timeout_s: float | None) -> bytes:
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            async with patience(timeout_s), self._answered(method, path, body, headers) as response:
                return await response.read()
        except TimeoutError:
            raise ServerLostError(f"{self._where(path)}: no response in {timeout_s} s") from None

    @asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of status 200."""
        where = self._where(path)
        if self._session.closed:
            raise ServerLostError(f"{where}: the client is closed")
        try:
            async with self._session.request(method, path, data=body, headers=headers) as response:
                if response.status != 200:
                    kind = ServerLostError if response.status >= 500 else GenerationError
                    content = (await response.read()).decode(errors="replace")
                    raise kind(f"{where}: {response.status}: {content:.500}")
                yield response
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            raise ServerLostError(f"{where}: {type(error).__name__}: {error}") from None

    def _where(self, path: str) -> str:
        return path if "://" in path else f"{self.url}{path}"


def _part_id(request: GenerationRequest, index: int) -> str:
    return request.request_id if request.n == 1 else f"{request.request_id}.{index}"


def _check_weights(version: PolicyVersion) -> None:
    """Raises GenerationError for a file that is not what the version says, OSError for one that can't be read."""
    path = Path(version.path)
    stats = [(file.name, file.stat()) for file in sorted(path.glob("*.safetensors"))]
    found = _hash(path, tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats))
    if found != version.sha256:
        raise GenerationError(f"sha256: {version.path} has {found}, the update names {version.sha256}")


@functools.lru_cache(maxsize=8)
def _hash(path: Path, _files: tuple[tuple[str, int, int, int, int], ...]) -> str:
    """The hash of a version, read once as long as its files are the same."""
    return weights_sha256(path)
