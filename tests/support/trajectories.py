"""Checks of a finished run that lost generation servers: every trajectory is there, once, and every token's version is
that of the weights that sampled it."""

from __future__ import annotations

import os
import re
import threading
import urllib.request
from collections import defaultdict
from contextlib import closing, suppress
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
from tests.support.runs import Launched, merged, tiny

_LOOK_S = 0.02  # the trainer deletes a version several steps after it was published
_TOLERANCE = 1e-4  # nats, float32 here and there
_TEXTS = 64  # in one forward pass
_Text = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # prompt, tokens, versions, log-probabilities
_METRIC = re.compile(r"^(?:areal_generation|vllm)[_:](\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def audited(state: Path, *, servers: int, interruption: str, steps: int, **groups: dict[str, Any]) -> RunConfig:
    """A run whose trajectories can be audited: payloads stay, the base model is far from uniform predictions, and every
    step changes the weights so much that no version passes for another. It learns to write long completions, so that
    some run whenever a server is killed. Slots are few and prompts of many steps are admitted at once, so that servers
    that are quicker than the trainer still run some when an update comes (in 24 steps 30 to 100 completions are
    interrupted, whoever else wants the cores)."""
    fields: dict[str, dict[str, Any]] = {
        "warmup": {"worked_steps": 100, "worked_batch": 16, "direct_steps": 0},
        "model": {"hidden_size": 64, "layers": 3, "intermediate_size": 128},
        "generation": {"servers": servers, "interruption": interruption, "slots": 8},
        "task": {"max_new_tokens": 112},
        "environment": {"verifier": "tests.support.verifiers:long", "verify_truncated": True},
        "rollout": {"retain": "all", "batch_size": 64, "max_staleness": 8},
        "training": {"steps": steps, "learning_rate": 5e-3, "weight_decay": 0.5, "checkpoint_every": steps},
        "evaluation": {"every": steps},
    }
    return tiny(state, **merged(fields, groups))


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
    with closing(TrajectoryLedger(run.run.ledger, group_size=config.algorithm.group_size)) as ledger:
        texts = _texts(run, ledger)
        assert any(len(set(versions.tolist())) > 1 for _, _, versions, _ in texts) or not interrupted
        files: dict[int, Path] = {}
        for number in range(config.training.steps):
            version = ledger.versions.get(number)
            assert version is not None
            assert weights_digest(published.file(version)) == version.digest
            files[number] = published.file(version)
    model = by_transformers(run.run.info().model_path, dtype=torch.float32)
    texts.sort(key=lambda text: -len(text[1]))  # those of a forward pass are padded to the same length
    for version, file in files.items():
        if not (of_version := [text for text in texts if version in text[2]]):
            continue
        recorded = np.concatenate([logprobs[versions == version] for _, _, versions, logprobs in of_version])
        exact = logprobs_of(model, file, of_version, version, torch.float64)
        # Weights that are moved so far in a step may amplify rounding: transformers' own shows by how much.
        rounding = np.abs(logprobs_of(model, file, of_version, version) - exact).max()
        np.testing.assert_allclose(recorded, exact, atol=_TOLERANCE + 10 * rounding, rtol=0)
        other = files.get(version - 1 if version else 1)
        if other is not None:  # the tolerance tells one version from the next
            wrong = logprobs_of(model, other, of_version[:_TEXTS], version)
            assert np.abs(recorded[: len(wrong)] - wrong).max() > 10 * _TOLERANCE


def _texts(run: Launched, ledger: TrajectoryLedger) -> list[_Text]:
    """All completions; no more is admitted than the steps consume, so at the end the ledger holds them and nothing
    else."""
    config = run.config
    steps, groups, size = range(1, config.training.steps + 1), config.groups_per_batch, config.algorithm.group_size
    assert not ledger.dropped()
    assert ledger.tokens().balanced
    consumed = len(steps) * groups
    assert {state: count for state, count in ledger.counts().items() if count} == {GroupState.CONSUMED: consumed}
    source = open_source(config, Tokenizer.from_folder(run.run.info().model_path))
    found: list[_Text] = []
    prompts: list[int] = []
    for step in steps:
        manifest = ledger.batch(step)
        assert manifest is not None
        for prompt_index, group in zip(ledger.prompt_indices(step), manifest.groups, strict=True):
            payload = read_group_file(run.run.payloads, group, range(size))
            assert tuple(payload.prompts[0].tolist()) == source.prompt(prompt_index).token_ids
            assert tuple(payload.lengths.tolist()) == group.lengths
            # Prompts are admitted in their order, each when the gate allows it: no server that took work had older
            # weights than these. A step trains on no token that its own weights, or later ones, sampled.
            oldest = -(-(prompt_index + 1) * size // config.rollout.batch_size) - 1 - config.max_staleness
            assert max(0, oldest) <= payload.versions.min()
            assert payload.versions.max() <= step - 1
            held = completions(payload)
            assert all((np.diff(versions) >= 0).all() for _, versions, _ in held)
            found += [(payload.prompts[0], *completion) for completion in held]
            prompts.append(prompt_index)
    assert sorted(prompts) == list(range(consumed))
    assert ledger.tokens().accounted == ledger.tokens().consumed == sum(len(text[1]) for text in found)
    return found


def completions(payload: GroupPayload) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, versions and log-probabilities of each."""
    arrays, cuts = (payload.tokens, payload.versions, payload.logprobs), np.cumsum(payload.lengths)[:-1]
    return list(zip(*(np.split(array, cuts) for array in arrays), strict=True))


@torch.inference_mode()
def logprobs_of(
    model: Any, file: Path, texts: list[_Text], version: int, dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Of the tokens that `version` sampled, by transformers under the weights in `file`, laid end to end."""
    missing, unexpected = model.to(dtype).load_state_dict(load_file(file), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    found: list[np.ndarray] = []
    for start in range(0, len(texts), _TEXTS):
        batch = texts[start : start + _TEXTS]
        width = max(len(prompt) + len(tokens) for prompt, tokens, _, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, (prompt, tokens, _, _) in enumerate(batch):  # padding behind a text changes nothing in it
            ids[row, : len(prompt) + len(tokens)] = torch.from_numpy(np.concatenate([prompt, tokens])).long()
        logprobs = model(ids).logits.log_softmax(-1)
        for row, (prompt, tokens, versions, _) in enumerate(batch):
            rows = logprobs[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1].numpy()
            found.append(rows[np.arange(len(tokens)), tokens][versions == version])
    return np.concatenate(found)
