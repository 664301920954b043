"""The trainer: one process per rank, in a loop of pull, recompute, optimise, publish.

    GET /batch/{k} -> payloads -> advantages -> pi_prox (one forward pass) -> PPO minibatches -> POST /versions (k)
    `-------- one step ahead: background.py --'                                     in background: publisher.py

Step k trains on policy version k - 1 and makes version k. All ranks follow the same batches. Only rank 0 publishes,
checkpoints and reports. A restarted trainer resumes from the newest complete checkpoint and replays the batches that
the ledger has fixed since. On a CPU a replay makes bitwise the same versions.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from areal_core.algorithm.advantages import Credit, advantages_of
from areal_core.api.controller_client import ControllerClient
from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, RunFinished
from areal_core.launch import heartbeat, logs, process
from areal_core.models import hub
from areal_core.models.adapters import ADAPTER, merged, write_adapter, write_adapter_config
from areal_core.models.folders import read_weights, write_model
from areal_core.models.spec import read_arrays, read_spec
from areal_core.storage import checkpoint, lease
from areal_core.storage.checkpoint import CheckpointInfo
from areal_core.storage.objects import DamagedError, Storage
from areal_core.storage.parts import read_tensors
from areal_core.storage.rundir import RunDir
from areal_core.tracking.timeline import TimelineWriter
from areal_core.training.background import BatchFeed
from areal_core.training.batching.partition import PromptCost, shard
from areal_core.training.batching.trajectories import Trajectories
from areal_core.training.distributed.ranks import RankGroup, rendezvous_of_ranks
from areal_core.training.engines.engine import (
    EngineState,
    StepStats,
    TrainingBatch,
    build_batch,
)
from areal_core.training.engines.registry import make_engine
from areal_core.training.flops import training_cost
from areal_core.training.metrics import StepMeter, StepTimes
from areal_core.training.publisher import Publisher
from areal_core.types import STOPPED, BatchGroup, BatchManifest, Float32Array

logger = logging.getLogger(__name__)


class Trainer:
    """One rank of the training group."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run_dir = run
        self.config: RunConfig = run.config()
        self.rank = rank
        self.controller = ControllerClient(run)
        self._trajectories = Trajectories(run)
        store = self.config.storage
        self.storage = Storage.open(run.info().checkpoint_url, store.endpoint_url, store.patience_s)
        self.spec = read_spec(run.info().model_path)
        self._lora = self.config.training.lora.adapter
        self.ranks = RankGroup(
            rank,
            self.config.trainer_processes,
            rendezvous=rendezvous_of_ranks(os.environ, run.root),
            timeout_s=self.config.training.collective_timeout_s,
            join_s=self.config.launch.start_timeout_s,
            backend="cpu:gloo,cuda:nccl" if self.config.launch.accelerator == "cuda" else "gloo",
        )
        weights = read_weights(run.info().model_path, self.spec)
        torch.manual_seed(self.config.seed)  # the RNG is part of the state: every new start must get the same
        self.engine = make_engine(self.config, self.spec, weights, self.ranks)
        self.publisher = Publisher(run, self.config, self.storage) if rank == 0 else None
        self.step = self._saved = self._resume()  # last step done; last step with a checkpoint
        self._device = torch.device(self.config.launch.accelerator)
        self.meter = StepMeter(self.config, self.spec, self.engine, self.ranks, run.weights)
        self.timeline = TimelineWriter(run.timeline_file("trainer", rank), cpu=time.process_time)

    def train(self) -> None:
        """Train until the last step, or until the controller says that the run has ended."""
        reason = "steps"
        fetching, steps = ControllerClient(self.run_dir), self.config.training.steps
        # Highest version published before this process started: steps up to it are a replay.
        newest = self.controller.status().step if self.rank == 0 else 0
        replayed = int(self.ranks.all_reduce_max(np.array([newest]))[0])
        feed = BatchFeed(fetching, lambda manifest: self._build(manifest, fetching), first=self.step + 1, last=steps)
        while self.step < steps:
            waiting_since = time.monotonic()
            try:
                with heartbeat.waiting("controller-0", f"step {self.step + 1}: no batch yet"):
                    manifest, batch = feed.next(self.publisher.check if self.publisher else lambda: None)
            except RunFinished as ending:
                reason = str(ending)
                break
            if manifest.step > replayed:
                feed.ahead()
            self._train_step(manifest, batch, waiting_since)
            if manifest.step <= replayed:
                # If the replay gives other model weights, a new incarnation begins and the controller assembles later
                # batches anew. No rank may fetch one of them before.
                self._until("publishing the repeated step", Publisher.drain)
                feed.ahead()
        self._finish(reason)
        self.ranks.close()

    # -- a step ------------------------------------------------------------------------------------------------

    def _train_step(self, manifest: BatchManifest, batch: TrainingBatch, waiting_since: float) -> None:
        times = StepTimes(waiting_since=waiting_since, start=time.monotonic())
        logs.at_step(manifest.step)
        heartbeat.report(f"step {manifest.step}: training")
        self.timeline.span("wait", waiting_since, times.start, manifest.step)
        stats = self._learn(batch, times)
        self.step = manifest.step
        self.meter.measure(batch, stats)
        tensors = self.engine.served()
        if self.config.sleeps and self._device.type == "cuda":
            torch.cuda.empty_cache()  # because publishing wakes the servers on this device
        if self.publisher is not None:
            with heartbeat.waiting("controller-0", f"step {self.step}: publishing"):
                self.publisher.publish(self.step, tensors)
        if self._is_due():
            self._checkpoint()
        if self.publisher is not None:
            times.end = time.monotonic()
            self.publisher.report(self.step, self.meter.values(manifest, stats, times), self.meter.staleness)

    def _learn(self, batch: TrainingBatch, times: StepTimes) -> StepStats:
        """Train on a batch. Raises DivergenceError."""
        proximal = self.engine.proximal_logprobs(batch) if self.config.recomputes_proximal else None
        times.recomputed = time.monotonic()
        stats = self.engine.train_step(batch, proximal)
        times.trained = time.monotonic()
        self.timeline.span("recompute", times.start, times.recomputed, batch.step)
        self.timeline.span("train", times.recomputed, times.trained, batch.step)
        return stats

    def _build(self, manifest: BatchManifest, controller: ControllerClient) -> TrainingBatch:
        """Build this rank's share of the batch. Every rank derives the same partition from the manifest."""
        config = self.config
        credits = advantages_of(manifest.groups, config.algorithm, config.max_new_tokens)
        shares = shard(
            [self._costs(group, credit) for group, credit in zip(manifest.groups, credits, strict=True)],
            config.training.minibatches,
            config.trainer_processes,
            seed=config.seed,
            step=manifest.step,
        )[self.rank]
        payloads = {
            part.group: self._trajectories.read(manifest.groups[part.group], part.sequences, controller)
            for share in shares
            for part in share
        }
        return build_batch(
            manifest.step,
            shares,
            payloads,
            credits,
            capacity=config.training.microbatch_tokens,
            algorithm=config.algorithm,
            max_new_tokens=config.max_new_tokens,
            share_prompts=self._shares_prompts,
        )

    @property
    def _shares_prompts(self) -> bool:
        """Whether completions share a prompt's computation; transformers' modules can't."""
        return self.config.shares_prompts and self.spec.transformers is None

    def _costs(self, group: BatchGroup, credit: Credit) -> list[PromptCost]:
        """Return the training cost of a group, by prompt. A sequence without a gradient costs nothing."""
        costs: list[PromptCost] = []
        trained = np.array(credit.moves()) | self.config.algorithm.regularised
        for prompt, tokens in enumerate(group.prompts):
            members = [sequence for sequence, its in enumerate(group.prompt_of) if its == prompt]
            lengths = [group.lengths[sequence] for sequence in members]
            once, completions = training_cost(self.spec, tokens, lengths, shared=self._shares_prompts)
            costs.append(PromptCost(once, np.where(trained[members], completions, 0.0).tolist(), members))
        return costs

    # -- checkpoints and the final model -----------------------------------------------------------------------

    def _resume(self) -> int:
        """Load the newest complete checkpoint that the controller knows. Returns its step, 0 without one.

        Rank 0 publishes the checkpoint's version again.
        """
        while (info := self._newest()) is not None:
            if (state := self._read(info)) is None:
                continue
            self.engine.load_state(state)
            logger.info("resumed from the checkpoint of step %d", info.step)
            tensors = self.engine.served()
            if self.publisher is not None:
                self.publisher.announce(info.step, tensors)
            return info.step
        return 0

    def _newest(self) -> CheckpointInfo | None:
        """Collective. Return the newest usable checkpoint, as rank 0 finds it."""
        found = checkpoint.newest(self.storage) if self.rank == 0 else None
        if found is not None and found.step > (known := self.controller.status().step):
            found = checkpoint.newest(self.storage, last=known)  # later ones: a launcher that has lost the run
        self._meet()
        taken = np.array([0, 0] if found is None else [found.step, found.number])
        step, number = self.ranks.all_reduce_max(taken).tolist()
        return found if self.rank == 0 or not step else checkpoint.at(self.storage, step, number)

    def _read(self, info: CheckpointInfo) -> EngineState | None:
        """Collective. Read this rank's part of a checkpoint's state. If any rank finds damage, all return None."""
        damage, read = "", None
        try:
            read = read_tensors(self.storage, info, (checkpoint.WEIGHTS, checkpoint.OPTIMIZER), self.engine.parts())
        except DamagedError as error:
            damage = str(error)
            logger.warning("%s", damage)
        self._meet()
        if self.ranks.all_reduce_max(np.array([int(read is None)]))[0]:
            if self.rank == 0:
                checkpoint.set_aside(self.storage, info, damage or f"{info.folder}: another rank found it damaged")
            return None
        assert read is not None
        return EngineState(arrays=read.arrays, shapes=read.shapes, scalars=info.extra["engine"])

    def _is_due(self) -> bool:
        """Collective. Whether a checkpoint is due and none is being written.

        While the store is slow or away, training continues and the checkpoint comes later.
        """
        every = self.config.training.checkpoint_every
        if self.step // every == self._saved // every:
            return False
        waits = self.publisher is not None and self.publisher.saving
        if waits and self.step % every == 0:
            logger.warning("step %d: the checkpoint of step %d is still being written", self.step, self._saved)
        return not self.ranks.all_reduce_max(np.array([int(waits)]))[0]

    def _checkpoint(self) -> None:
        state = self.engine.state()
        if self.publisher is not None:
            self.publisher.checkpoint(self.step, state)
        self._saved = self.step

    def _until(self, what: str, done: Callable[[Publisher, float], bool]) -> None:
        """Collective. Wait until rank 0's publisher is done, however slow the store is.

        The ranks exchange messages often enough that no collective times out.
        """
        again_s = self.config.training.collective_timeout_s / 4
        with heartbeat.waiting(heartbeat.STORE, f"step {self.step}: {what}"):
            waits = True
            while waits:
                waits = self.publisher is not None and not done(self.publisher, again_s)
                waits = bool(self.ranks.all_reduce_max(np.array([int(waits)]))[0])

    def _meet(self) -> None:
        """Wait for all ranks; a store may delay some of them."""
        with heartbeat.waiting("trainer", "waiting for all ranks"):
            self.ranks.meet(self.config.storage.patience_s)

    def _finish(self, reason: str) -> None:
        """Commit a checkpoint of the last step, save the model and tell the controller that the run has ended.

        A stopped run saves no model, because it can be resumed.
        """
        if self.step != self._saved:
            self._until("a checkpoint is being written", Publisher.make_room)
            self._checkpoint()
        tensors = self.engine.weights()
        with heartbeat.waiting(heartbeat.STORE, "saving the last checkpoint and the model"):
            if self.publisher is not None:
                self.publisher.drain()
                model = "" if reason == STOPPED else self._save_model(tensors)
                logger.info("ended after step %d: %s", self.step, reason)
                self.controller.finish(reason, self.step, model)

    def _save_model(self, weights: Mapping[str, Float32Array]) -> str:
        """Save the final policy in the store as a transformers folder, and return its URL.

        With LoRA that folder has the base model with the adapter merged in. The adapter is also saved by itself, in
        peft's format.
        """
        folder, base = self.run_dir.root / "final", Path(self.run_dir.info().model_path)
        folders = [folder]
        if self._lora is not None:
            folders.append(adapter := self.run_dir.root / "adapter")
            adapter.mkdir(exist_ok=True)
            write_adapter(adapter / ADAPTER, weights, self._lora)
            named = self.config.model.path or ""
            write_adapter_config(adapter, self._lora, named if named.startswith(hub.PREFIX) else str(base))
            weights = merged(read_arrays(base, self.spec), weights, self._lora)
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        write_model(folder, self.spec, tensors, base / "tokenizer.json")
        lease.check(self.storage, self.run_dir.info().number)
        for saved in folders:
            for file in sorted(saved.iterdir()):
                self.storage.child(saved.name).put_file(file, file.name)
        return self.storage.child(folder.name).url


def main() -> None:
    run = RunDir.of_command_line()
    rank = int(os.environ.get("RANK", "0"))  # set by every launcher of ranks
    logs.start("trainer", rank)
    process.tie_to_parent(run.ready_file("trainer", rank))
    torch.set_num_threads(1)
    try:
        trainer = Trainer(run, rank)
        process.announce_ready(run.ready_file("trainer", rank))
        trainer.train()
    except ArealError as error:
        logger.error("%s", error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    process.run_and_exit(main)
