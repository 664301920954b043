"""Checks of a finished run that lost generation servers: every trajectory is there, once, and every token's version is
that of the weights that sampled it."""

from __future__ import annotations

import os
import re
import threading
import urllib.request
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from areal_core.api.access import authorization
from areal_core.api.pending_completions import receive
from areal_core.api.scored_groups import read_group_file
from areal_core.api.wire import encode_request
from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.environments.source import open_source
from areal_core.models.tokenizer import Tokenizer
from areal_core.models.verified import weights_digest
from areal_core.types import GenerationRequest, GroupPayload, GroupState, PolicyVersion
from tests.support.generation import by_transformers
from tests.support.runs import Launched, tiny

_LOOK_S = 0.02  # the trainer deletes a version several steps after it was published
_TOLERANCE = 1e-4  # nats, float32 here and there
_TEXTS = 64  # in one forward pass
_METRIC = re.compile(r"^(?:areal_generation|vllm)[_:](\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def audited(state: Path, *, servers: int, interruption: str, steps: int, **groups: dict[str, Any]) -> RunConfig:
    """A run whose trajectories can be audited: payloads stay, the base model is far from uniform predictions, and every
    step changes the weights so much that no version passes for another. Nothing is learnt. Slots are few and prompts
    of many steps are admitted at once, so that servers that are quicker than the trainer still run some when an update
    comes (in 24 steps 30 to 100 completions are interrupted, whoever else wants the cores)."""
    fields: dict[str, dict[str, Any]] = {
        "warmup": {"worked_steps": 100, "worked_batch": 16, "direct_steps": 0},
        "model": {"hidden_size": 64, "layers": 3, "intermediate_size": 128},
        "generation": {"servers": servers, "interruption": interruption, "slots": 8},
        "task": {"max_new_tokens": 112},
        "rollout": {"retain": "all", "batch_size": 64, "max_staleness": 8},
        "training": {"steps": steps, "learning_rate": 5e-3, "weight_decay": 0.5, "checkpoint_every": steps},
        "evaluation": {"every": steps},
    }
    merged = {name: fields.get(name, {}) | groups.get(name, {}) for name in fields | groups}
    return tiny(state, mode="async", **merged)


class ServerView:
    """A generation server of a run, whatever its engine, through its public routes; `token` is the run's."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._headers = authorization(token)

    def running(self) -> int:
        """Completions that it decodes now."""
        metrics = self._metrics()
        return int(metrics.get("running", 0) + metrics.get("num_requests_running", 0))

    def generated(self) -> int:
        """Tokens that it has sampled."""
        metrics = self._metrics()
        return int(metrics.get("generated_tokens", 0) + metrics.get("generation_tokens_total", 0))

    def ask(self, request: GenerationRequest) -> int:
        """Send it a request from outside the run; returns the tokens that it sampled for that."""
        body = encode_request(request)
        headers = self._headers | {"Content-Type": "application/json"}
        post = urllib.request.Request(f"{self.url}/inference/v1/generate", body, headers)
        with urllib.request.urlopen(post, timeout=30.0) as response:
            return sum(choice.tokens for choice in receive(response.read()).choices)

    def version(self) -> int:
        (label,) = re.findall(r'"weight_version": ?"(\d+)"', self._get("/weight_info"))
        return int(label)

    def _metrics(self) -> dict[str, float]:
        values: dict[str, float] = defaultdict(float)
        for name, value in _METRIC.findall(self._get("/metrics")):
            values[name] += float(value)
        return values

    def _get(self, path: str) -> str:
        get = urllib.request.Request(self.url + path, headers=self._headers)
        with urllib.request.urlopen(get, timeout=10.0) as response:
            return response.read().decode()


def has_come_back(run: Launched, index: int, *, but: int) -> None:
    """Wait until a generation server was started again, has weights that are no older than the newest ones of that
    time, and samples. `but` is the process that was lost."""
    run.pid("generation", index, but=but)
    server, published = ServerView(run.url("generation", index), run.run.token()), run.step()
    sampled = server.generated()
    run.wait_for(f"generation-{index} has version {published}", lambda: server.version() >= published)
    run.wait_for(f"generation-{index} samples", lambda: server.generated() > sampled)


class PublishedWeights:
    """Every version that a run publishes, kept. A context, to be entered before the first steps; a run deletes versions
    that it needs no more."""

    def __init__(self, run: Launched) -> None:
        self._published = run.run.weights
        self._kept = Path(run.config.state_dir) / f"{run.run.root.name}-weights"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keep weights")

    def __enter__(self) -> PublishedWeights:
        self._kept.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def file(self, version: PolicyVersion) -> Path:
        """The weights of a version; the base model's are where they are."""
        if version.version == 0:
            return Path(version.path) / "model.safetensors"
        return self._kept / Path(version.path).name

    def _keep(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for folder in self._published.glob("v*"):
                if (folder / "manifest.json").exists():
                    with suppress(FileExistsError, FileNotFoundError):  # kept before, or deleted just now
                        os.link(folder / "model.safetensors", self._kept / folder.name)


def check_trajectories(run: Launched, published: PublishedWeights, *, interrupted: bool = True) -> None:
    """Nothing lost, nothing twice, every token's version and log-probability correct, in a run that has finished in
    order and dropped nothing. `interrupted`: an update must have come while completions ran, some tokens before and
    some after."""
    config = run.config
    ledger = TrajectoryLedger(run.run.ledger, group_size=config.algorithm.group_size)
    try:
        _check_groups(config, ledger)
        batches = _payloads(run, ledger)
        for step, batch in batches.items():
            for prompt_index, payload in batch.items():
                _check_versions(config, step, prompt_index, payload)
        reference = _Reference(run, ledger, published)
        payloads = [payload for batch in batches.values() for payload in batch.values()]
        reference.check(payloads)
        versions = range(config.training.steps)
        assert {version for payload in payloads for version in payload.versions.tolist()} <= set(versions)
        seams = (len(set(completion[1].tolist())) > 1 for payload in payloads for completion in _split(payload))
        assert any(seams) or not interrupted
    finally:
        ledger.close()


def _check_groups(config: RunConfig, ledger: TrajectoryLedger) -> None:
    """No more is admitted than the steps consume, so at the end the ledger holds the batches and nothing else."""
    steps, groups = config.training.steps, config.groups_per_batch
    assert not ledger.dropped()
    assert {state: count for state, count in ledger.counts().items() if count} == {GroupState.CONSUMED: steps * groups}
    batches = [ledger.batch(step) for step in range(1, steps + 1)]
    rows = [batch.groups for batch in batches if batch is not None]
    assert [len(row) for row in rows] == [groups] * steps
    assert all(len(group.lengths) == config.algorithm.group_size for row in rows for group in row)
    assert len({group.group_id for row in rows for group in row}) == steps * groups
    consumed = [index for step in range(1, steps + 1) for index in ledger.prompt_indices(step)]
    assert sorted(consumed) == list(range(steps * groups))
    tokens = ledger.tokens()
    assert tokens.balanced
    assert tokens.accounted == tokens.consumed == sum(sum(group.lengths) for row in rows for group in row)


def _payloads(run: Launched, ledger: TrajectoryLedger) -> dict[int, dict[int, GroupPayload]]:
    """step -> prompt index -> the group; its prompt is the one of that index."""
    source = open_source(run.config, Tokenizer.from_folder(run.run.info().model_path))
    found: dict[int, dict[int, GroupPayload]] = defaultdict(dict)
    for step in range(1, run.config.training.steps + 1):
        manifest = ledger.batch(step)
        assert manifest is not None
        for prompt_index, group in zip(ledger.prompt_indices(step), manifest.groups, strict=True):
            payload = read_group_file(run.run.payloads, group, range(len(group.lengths)))
            assert tuple(payload.prompt_tokens.tolist()) == source.prompt(prompt_index).token_ids
            assert tuple(payload.lengths.tolist()) == group.lengths
            assert len(payload.tokens) == len(payload.versions) == len(payload.logprobs) == sum(group.lengths)
            found[step][prompt_index] = payload
    return found


def _check_versions(config: RunConfig, step: int, prompt_index: int, payload: GroupPayload) -> None:
    """A step trains on no token that its own weights, or later ones, sampled. Where nothing was dropped prompts were
    admitted in their order, each when the gate allowed it: so no server that took work had older weights than these."""
    admitted = (prompt_index + 1) * config.algorithm.group_size
    oldest = -(-admitted // config.rollout.batch_size) - 1 - config.max_staleness
    assert max(0, oldest) <= payload.versions.min()
    assert payload.versions.max() <= step - 1
    for _, versions, _ in _split(payload):
        assert (np.diff(versions) >= 0).all(), versions


def _split(payload: GroupPayload) -> list[tuple[Any, Any, Any]]:
    """Tokens, versions and log-probabilities of each completion, [L] each."""
    cuts = np.cumsum(payload.lengths)[:-1]
    arrays = (np.split(array, cuts) for array in (payload.tokens, payload.versions, payload.logprobs))
    return list(zip(*arrays, strict=True))


class _Reference:
    """Transformers' log-probabilities of the tokens, under the weights of their versions."""

    def __init__(self, run: Launched, ledger: TrajectoryLedger, published: PublishedWeights) -> None:
        self._model = by_transformers(run.run.info().model_path, dtype=torch.float32)
        self._files: dict[int, Path] = {}
        for number in range(run.config.training.steps):
            version = ledger.versions.get(number)
            assert version is not None
            assert weights_digest(published.file(version)) == version.digest
            self._files[number] = published.file(version)

    def check(self, payloads: list[GroupPayload]) -> None:
        texts = [
            (payload.prompt_tokens, *completion) for payload in payloads for completion in _split(payload)
        ]  # prompt, tokens, versions, log-probabilities
        texts.sort(key=lambda text: -len(text[1]))  # those of a forward pass are padded to the same length
        for version in self._files:
            of_version = [text for text in texts if version in text[2]]
            if not of_version:
                continue
            recorded = np.concatenate([text[3][text[2] == version] for text in of_version])
            exact = self._logprobs(version, version, of_version, torch.float64)
            # Weights that are moved so far in a step may amplify rounding: transformers' own shows by how much.
            rounding = np.abs(self._logprobs(version, version, of_version) - exact).max()
            np.testing.assert_allclose(recorded, exact, atol=_TOLERANCE + 10 * rounding, rtol=0)
            other = version - 1 if version else 1
            if other in self._files:  # the tolerance tells one version from the next
                wrong = self._logprobs(other, version, of_version[:_TEXTS])
                assert np.abs(recorded[: len(wrong)] - wrong).max() > 10 * _TOLERANCE

    @torch.inference_mode()
    def _logprobs(
        self, version: int, of_version: int, texts: list[tuple[Any, ...]], dtype: torch.dtype = torch.float32
    ) -> np.ndarray:
        """Of the tokens that `of_version` sampled, under `version`, laid end to end."""
        self._model.to(dtype)
        self._load(version)
        found: list[np.ndarray] = []
        for start in range(0, len(texts), _TEXTS):
            batch = texts[start : start + _TEXTS]
            width = max(len(prompt) + len(tokens) for prompt, tokens, _, _ in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            for row, (prompt, tokens, _, _) in enumerate(batch):  # padding behind a text changes nothing in it
                ids[row, : len(prompt) + len(tokens)] = torch.from_numpy(np.concatenate([prompt, tokens])).long()
            logprobs = self._model(ids).logits.log_softmax(-1)
            for row, (prompt, tokens, versions, _) in enumerate(batch):
                rows = logprobs[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1].numpy()
                found.append(rows[np.arange(len(tokens)), tokens][versions == of_version])
        return np.concatenate(found)

    def _load(self, version: int) -> None:
        missing, unexpected = self._model.load_state_dict(load_file(self._files[version]), strict=False)
        assert not unexpected
        assert set(missing) <= ({"lm_head.weight"} if self._model.config.tie_word_embeddings else set())
