"""The embedded engine: continuous batching of sampled answers, interruptible between any two steps.

A step is three verbs: *schedule* gives free slots to waiting answers and prefills their prompts, *run* decodes one
token of every running answer, *postprocess* records the tokens and frees the slots of finished answers.

Running answers always fill slots 0 to N - 1: what a finished answer leaves is filled from the end, so that the part of
the KV cache that is read stays in one piece. The cache holds all tokens of an answer but the last, which the next step
feeds: so a prompt, shared by its answers, and a text that is read again after an update are one and the same case.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_core.errors import DivergenceError, GenerationError, ModelError
from areal_core.generation.decoder import Decoder
from areal_core.generation.sampling import stream_seed, uniforms
from areal_core.generation.served import EngineStats, Generation, check_request
from areal_core.model import ModelSpec, read_weights
from areal_core.types import GenerationRequest
from areal_core.wire import Answer

_BLOCK = 32  # columns that the KV cache grows by
_PREFILL_TOKENS = 8192  # in one forward pass, padding included: bounds the memory of activations


@dataclass(slots=True)
class _Group:
    """A request under way. Its answers start in order, as slots become free."""

    request: GenerationRequest
    answers: list[Answer | None]
    started: int = 0
    missing: int = 0  # answers not finished
    prompt_cache: Tensor | None = None  # [layers, 2, kv_heads, >= prompt - 1, head_dim], until all answers have started

    @property
    def unstarted(self) -> int:
        return len(self.answers) - self.started


class _Slots:
    """What is known of the answers in the slots: one row each, moved together."""

    def __init__(self, slots: int, context: int) -> None:
        self.tokens = np.zeros((slots, context), dtype=np.int32)  # prompt and answer
        self.logprobs = np.zeros((slots, context), dtype=np.float32)  # of the token in the same column
        self.versions = np.zeros((slots, context), dtype=np.int32)
        self.length = np.ones(slots, dtype=np.int64)  # tokens so far, prompt included
        self.prompt = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)  # length at which the answer is cut off
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.greedy = np.zeros(slots, dtype=np.bool_)
        self.stops = np.full((slots, 1), -1, dtype=np.int32)  # end tokens, padded with -1
        self.group = np.empty(slots, dtype=object)
        self.index = np.zeros(slots, dtype=np.int64)  # place in the group

    def fill(self, row: int, group: _Group, index: int) -> None:
        request, prompt = group.request, len(group.request.token_ids)
        self.tokens[row, :prompt] = request.token_ids
        self.length[row] = self.prompt[row] = prompt
        self.limit[row] = min(prompt + request.max_tokens, self.tokens.shape[1])
        self.seed[row] = stream_seed(request.seed, index)
        self.greedy[row] = request.greedy
        missing = len(request.stop_token_ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
        self.group[row], self.index[row] = group, index

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        for rows in vars(self).values():
            rows[target] = rows[source]

    def answer(self, row: int, finish_reason: str) -> Answer:
        span = slice(self.prompt[row], self.length[row])
        return Answer(
            token_ids=self.tokens[row, span].copy(),
            logprobs=self.logprobs[row, span].copy(),
            versions=self.versions[row, span].copy(),
            finish_reason=finish_reason,
        )


class Engine:
    """Decodes requests at temperature 1, or greedily. Not thread-safe: one thread calls it, between steps.

    `deterministic` makes tokens and log-probabilities of a request independent of its company, to the bit: every
    computation has one fixed shape (all slots, the whole context, one prompt at a time), so it rests on nothing but the
    BLAS library treating the rows of one product alike, which the tests check. It holds between updates of weights, for
    one build on one kind of machine and one number of slots. It costs the shortcuts that a smaller batch would allow.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        *,
        slots: int,
        context: int | None = None,
        version: int = 0,
        deterministic: bool = False,
        device: str = "cpu",
    ) -> None:
        self.spec = spec
        self.slots = slots
        self.context = context or spec.context
        self.version = version
        self.admitting = True  # False: running answers go on, waiting ones stay where they are
        self.stats = EngineStats()
        self._deterministic = deterministic
        self._device = device
        self._decoder = self.prepare(weights)
        self._groups: dict[str, _Group] = {}  # by request id
        self._waiting: deque[_Group] = deque()  # groups with answers that have not started
        self._running = 0
        self._rows = _Slots(slots, self.context)
        self._cache = self._empty_cache(self.context if deterministic else _BLOCK)
        self._stale = False

    @property
    def running(self) -> int:
        """Answers in slots."""
        return self._running

    @property
    def waiting(self) -> int:
        """Answers without a slot."""
        return sum(group.unstarted for group in self._waiting)

    @property
    def unfinished_tokens(self) -> int:
        """Tokens sampled so far for requests that are not finished."""
        decoding = int((self._rows.length[: self._running] - self._rows.prompt[: self._running]).sum())
        groups = self._groups.values()
        return decoding + sum(len(answer.token_ids) for group in groups for answer in group.answers if answer)

    def check(self, request: GenerationRequest) -> None:
        """Raise GenerationError, its message starting with the field's name, if the request can't be served. Any thread
        may call it."""
        check_request(request, self.spec, self.context)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises GenerationError as `check` does, and for an id that is being served."""
        self.check(request)
        if request.request_id in self._groups:
            raise GenerationError(f"request_id: {request.request_id} is already being served")
        group = _Group(request, [None] * request.n, missing=request.n)
        self._groups[request.request_id] = group
        self._waiting.append(group)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Sample one token for every running answer; the requests that this finished."""
        self._schedule()
        if self._running == 0:
            return []
        return self._postprocess(*self._run())

    def generate(self, requests: Iterable[GenerationRequest]) -> list[tuple[Answer, ...]]:
        """Serve requests to their end; their answers in the order of the requests."""
        ids = []
        for request in requests:
            self.add(request)
            ids.append(request.request_id)
        finished: dict[str, tuple[Answer, ...]] = {}
        while self._running or self._waiting:
            finished |= {generation.request.request_id: generation.answers for generation in self.step()}
        return [finished[request_id] for request_id in ids]

    @torch.inference_mode()
    def abort(self, request_ids: Collection[str] | None = None) -> list[Generation]:
        """End requests (None: all of them) now, with what they have; unknown ids are passed over."""
        ids = self._groups.keys() if request_ids is None else self._groups.keys() & set(request_ids)
        doomed = {request_id: self._groups[request_id] for request_id in ids}
        self._waiting = deque(group for group in self._waiting if group.request.request_id not in doomed)
        rows = [row for row in range(self._running) if self._rows.group[row].request.request_id in doomed]
        for group in doomed.values():
            for index in range(group.started, len(group.answers)):
                group.answers[index] = _nothing()
            group.missing -= group.unstarted
            group.started = len(group.answers)
        never_started = [self._close(group) for group in doomed.values() if group.missing == 0]
        finished = np.array(rows, dtype=np.int64)
        ended = self._release(finished, ["abort"] * len(rows))
        self._arrange(finished)
        return never_started + ended

    def read(self, file: Path) -> dict[str, Tensor]:
        """The weights of a safetensors file. Raises ModelError for others than the engine can run."""
        weights = read_weights(file, self.spec)
        for name, tensor in weights.items():
            if not tensor.isfinite().all():
                raise ModelError(f"{name}: holds numbers that are not finite")
        return weights

    def prepare(self, weights: Mapping[str, Tensor]) -> Decoder:
        """Weights made ready for `swap`; touches nothing of the engine, so that another thread may do it."""
        return Decoder(self.spec, weights, self.context, self._device)

    def swap(self, decoder: Decoder, version: int, *, recompute: bool = True) -> None:
        """Go on with other weights. With `recompute` running answers go on as if those had read all of their tokens;
        without, their keys and values stay those of the weights that computed them."""
        start = time.perf_counter()
        self._decoder = decoder
        self.version = version
        if recompute:
            self.clear_cache()
        self.stats.swap_ms = 1e3 * (time.perf_counter() - start)

    def clear_cache(self) -> None:
        """Forget keys and values: before the next step, those of running answers are computed again."""
        self._stale = True
        for group in self._waiting:
            group.prompt_cache = None

    def _schedule(self) -> None:
        if self._stale:
            self._recompute()
        starting = self._starting() if self.admitting else []
        first = self._running
        fresh = [group for group, _ in starting if group.prompt_cache is None]
        prompts = [np.array(group.request.token_ids[:-1], dtype=np.int32) for group in fresh]
        for members, cache in self._prefill(prompts):
            for place, member in enumerate(members):
                fresh[member].prompt_cache = cache[:, :, place]
        for group, count in starting:
            for row in range(self._running, self._running + count):
                self._rows.fill(row, group, group.started)
                group.started += 1
            self._running += count
        self._fit_cache()
        row = first
        for group, count in starting:
            if group.prompt_cache is not None:  # prompts of one token have nothing to share
                width = len(group.request.token_ids) - 1
                self._cache[:, :, row : row + count, :, :width] = group.prompt_cache[:, :, None, :, :width]
            row += count
            if not group.unstarted:
                group.prompt_cache = None

    def _starting(self) -> list[tuple[_Group, int]]:
        """Groups in the order of their arrival and how many of their answers get a slot now."""
        starting: list[tuple[_Group, int]] = []
        free = self.slots - self._running
        while free and self._waiting:
            group = self._waiting[0]
            count = min(free, group.unstarted)
            starting.append((group, count))
            free -= count
            if count == group.unstarted:
                self._waiting.popleft()
        return starting

    def _run(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Next tokens and their log-probabilities, both [N]."""
        running, rows = self._running, self._rows
        batch = self.slots if self._deterministic else running
        positions = rows.length[:batch] - 1
        tokens = rows.tokens[np.arange(batch), positions]
        logits = self._decoder.step(
            self._to_device(tokens), self._to_device(positions), self._cache, self._zones(batch)
        )
        logprobs = logits[:running].float().log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        if not total.isfinite().all():
            raise DivergenceError(f"logits of version {self.version} are not finite")
        u = self._to_device(uniforms(rows.seed[:running], rows.length[:running] - rows.prompt[:running]))
        chosen = torch.searchsorted(cumulative, u[:, None] * total, right=True)
        if rows.greedy[:running].any():
            greedy = self._to_device(rows.greedy[:running])
            chosen = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), chosen)
        return chosen[:, 0].cpu().numpy(), logprobs.gather(1, chosen)[:, 0].cpu().numpy()

    def _postprocess(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> list[Generation]:
        running, rows = self._running, self._rows
        at = np.arange(running), rows.length[:running]
        rows.tokens[at], rows.logprobs[at], rows.versions[at] = tokens, logprobs, self.version
        rows.length[:running] += 1
        self.stats.generated_tokens += running
        stopped = (rows.stops[:running] == tokens[:, None]).any(axis=1)
        finished = np.flatnonzero(stopped | (rows.length[:running] >= rows.limit[:running]))
        completed = self._release(finished, ["stop" if stopped[row] else "length" for row in finished])
        self._arrange(finished)
        return completed

    def _release(self, finished: NDArray[np.int64], reasons: Sequence[str]) -> list[Generation]:
        """Take the answers out of these slots; the requests that this completes."""
        completed: list[Generation] = []
        for row, reason in zip(finished.tolist(), reasons, strict=True):
            group = cast(_Group, self._rows.group[row])
            group.answers[self._rows.index[row]] = self._rows.answer(row, reason)
            group.missing -= 1
            if group.missing == 0:
                completed.append(self._close(group))
        return completed

    def _arrange(self, finished: NDArray[np.int64]) -> None:
        """Fill the slots that `finished` answers have left, long answers first and then short ones, with few moves."""
        left = self._running - len(finished)
        long = self._rows.length[: self._running] > self._short_columns
        short = ~long
        long[finished] = short[finished] = False
        places, first_short = np.arange(self._running), np.count_nonzero(long)
        if not len(finished) and not long[first_short:].any():
            return
        moves: list[tuple[NDArray[np.int64], NDArray[np.int64], Tensor]] = []
        for kind, inside in ((long, places < first_short), (short, (places >= first_short) & (places < left))):
            source, target = np.flatnonzero(kind & ~inside), np.flatnonzero(inside & ~kind)
            columns = self._cache.shape[4] if kind is long else self._short_columns
            moves.append((source, target, self._cache[:, :, source, :, :columns]))  # read before anything is written
        for _, target, cache in moves:
            self._cache[:, :, target, :, : cache.shape[4]] = cache
        self._rows.move(np.concatenate([source for source, _, _ in moves]), np.concatenate([to for _, to, _ in moves]))
        self._rows.length[left : self._running] = 1  # an empty slot decodes a token at position 0 when shapes are fixed
        self._rows.group[left : self._running] = None
        self._running = left

    @property
    def _short_columns(self) -> int:
        """Columns of the cache that a short answer needs at most: about half of them. Attention over what an answer
        does not have is wasted, and most answers are much shorter than the longest."""
        return 0 if self._deterministic else self._cache.shape[4] // 2 // _BLOCK * _BLOCK

    def _zones(self, rows: int) -> list[tuple[int, int]]:
        """How many answers need how many columns, in their order. Correct wherever answers stand, cheap once they are
        arranged."""
        long = np.flatnonzero(self._rows.length[:rows] > self._short_columns)
        first_short = int(long[-1]) + 1 if len(long) else 0
        zones = ((first_short, self._cache.shape[4]), (rows - first_short, self._short_columns))
        return [(count, columns) for count, columns in zones if count]

    def _close(self, group: _Group) -> Generation:
        del self._groups[group.request.request_id]
        assert all(answer is not None for answer in group.answers)
        return Generation(
            request=group.request, answers=tuple(answer for answer in group.answers if answer is not None)
        )

    def _recompute(self) -> None:
        """Read all tokens of running answers again, under the weights of now."""
        start = time.perf_counter()
        rows = self._rows
        texts = [rows.tokens[row, : rows.length[row] - 1] for row in range(self._running)]
        for members, cache in self._prefill(texts):
            self._cache[:, :, members, :, : cache.shape[4]] = cache
        self._stale = False
        self.stats.recompute_ms = 1e3 * (time.perf_counter() - start)
        self.stats.recomputed_tokens = sum(len(text) for text in texts)

    def _prefill(self, texts: Sequence[NDArray[np.int32]]) -> Iterable[tuple[list[int], Tensor]]:
        """Keys and values of texts: for some of them at a time, their places in `texts` and their cache
        [layers, 2, places, kv_heads, columns, head_dim]. Empty texts have none."""
        order = sorted((place for place in range(len(texts)) if len(texts[place])), key=lambda place: len(texts[place]))
        while order:
            # From the longest down, so that the texts of one pass are about equally long.
            width = self.context if self._deterministic else len(texts[order[-1]])
            count = 1 if self._deterministic else max(1, _PREFILL_TOKENS // width)
            members, order = order[-count:], order[:-count]
            tokens = np.zeros((len(members), width), dtype=np.int32)
            for row, member in enumerate(members):
                tokens[row, : len(texts[member])] = texts[member]
            yield members, self._decoder.prefill(self._to_device(tokens))

    def _fit_cache(self) -> None:
        """Give the cache as many columns as the longest running answer needs, in blocks. Attention reads every column
        of every answer, so it is worth a copy to lose two blocks."""
        if self._deterministic or self._running == 0:
            return
        columns = self._cache.shape[4]
        needed = -(-int(self._rows.length[: self._running].max()) // _BLOCK) * _BLOCK
        if columns - 2 * _BLOCK < needed <= columns:
            return
        fitted, kept = self._empty_cache(needed), min(needed, columns)
        fitted[:, :, : self._running, :, :kept] = self._cache[:, :, : self._running, :, :kept]
        self._cache = fitted

    def _empty_cache(self, columns: int) -> Tensor:
        """Zeros, as columns that are masked out still take part in products, with a weight of 0."""
        spec = self.spec
        return torch.zeros(
            spec.layers, 2, self.slots, spec.kv_heads, columns, spec.head_dim, device=self._device, dtype=torch.float32
        )

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _nothing() -> Answer:
    empty = np.zeros(0, dtype=np.int32)
    return Answer(token_ids=empty, logprobs=np.zeros(0, dtype=np.float32), versions=empty, finish_reason="abort")
