"""The trainer: one process a rank, in a loop of pull, recompute, optimise, publish.

    GET /batch/{k} -> payloads -> advantages -> pi_prox (one forward pass) -> PPO minibatches -> POST /versions (k)

Step k trains on policy version k - 1 and makes version k. Rank 0 alone publishes, checkpoints and reports; the others
follow the same batches. A restarted trainer resumes from the newest complete checkpoint and replays the batches that
the ledger has fixed since: on a CPU it makes the same versions again, bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from areal_core import checkpoint, process, weights
from areal_core.algorithm.advantages import ADVANTAGES
from areal_core.config import RunConfig
from areal_core.controller_client import ControllerClient
from areal_core.errors import ArealError, RunFinished, StorageError
from areal_core.model import read_spec, read_weights, write_model
from areal_core.rewards.packing import unpack_group
from areal_core.rundir import RunDir
from areal_core.storage import Storage
from areal_core.timeline import TimelineWriter
from areal_core.training.batching import shard
from areal_core.training.emulated import EmulatedTrainingEngine
from areal_core.training.engine import EngineState, StepStats, TrainingBatch, TrainingEngine, build_batch
from areal_core.training.torch_engine import TorchEngine
from areal_core.types import BatchManifest, MetricRow

logger = logging.getLogger(__name__)


class Trainer:
    """One rank of the training group."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run_dir = run
        self.config: RunConfig = run.config()
        self.rank = rank
        self.controller = ControllerClient(run)
        self.storage = Storage.open(run.info().checkpoint_url, self.config.storage.endpoint_url)
        self.timeline = TimelineWriter(run.timeline_file("trainer", rank))
        self.spec = read_spec(run.info().model_path)
        self.engine = self._engine()
        self.step = self._saved = self._resume()  # the last step done, and the last one with a checkpoint

    def train(self) -> None:
        """Train until the last step or until the controller says that the run has ended."""
        reason = "steps"
        while self.step < self.config.training.steps:
            waiting_since = time.monotonic()
            try:
                manifest = self.controller.batch(self.step + 1)
            except RunFinished as ending:
                reason = str(ending)
                break
            self._train_step(manifest, waiting_since)
        if self.rank == 0:
            if self.step != self._saved:
                self._checkpoint()
            self.controller.finish(reason, self.step, self._save_model())
        self.engine.close()

    def _engine(self) -> TrainingEngine:
        run, config = self.run_dir, self.config
        weights = read_weights(run.info().model_path, self.spec)
        if config.emulated:
            return EmulatedTrainingEngine(
                {name: tensor.numpy() for name, tensor in weights.items()},
                config.emulation,
                replicas=config.training_ranks,
                switches=config.mode == "sync",
                learning_rate=config.training.learning_rate,
            )
        return TorchEngine(
            self.spec,
            weights,
            config.training,
            config.algorithm,
            rank=self.rank,
            world_size=config.training_ranks,
            rendezvous=run.root / f"rendezvous-{os.environ.get('AREAL_ATTEMPT', '0')}",
        )

    # -- a step ------------------------------------------------------------------------------------------------

    def _train_step(self, manifest: BatchManifest, waiting_since: float) -> None:
        batch = self._build(manifest)
        got_batch = time.monotonic()
        proximal = self.engine.logprobs(batch) if self.config.recomputes_proximal else None
        recomputed = time.monotonic()
        stats = self.engine.train_step(batch, proximal)
        trained = time.monotonic()
        self.step = manifest.step
        self._spans(("wait", waiting_since), ("recompute", got_batch), ("train", recomputed), ("", trained))
        staleness = self._staleness(manifest, batch)
        if self.rank == 0:
            version = weights.publish(self.run_dir.weights, self.step, self.engine.weights())
            weights.release(self.run_dir.weights, self.controller.announce(version))
            published = time.monotonic()
            times = {
                "time/batch_wait_s": got_batch - waiting_since,
                "time/proximal_s": recomputed - got_batch,
                "time/train_s": trained - recomputed,
                "time/publish_s": published - trained,
                "bubble/trainer_wait": (got_batch - waiting_since) / (published - waiting_since),
            }
            self._spans(("publish", trained), ("", published))
            self._report(manifest, stats, staleness, times, self._mismatch(batch, stats))
            if self.step % self.config.training.checkpoint_every == 0:
                self._checkpoint()

    def _build(self, manifest: BatchManifest) -> TrainingBatch:
        """This rank's share of the batch. Every rank derives the same partition from the manifest."""
        config = self.config
        advantages = ADVANTAGES[config.algorithm.advantage]([group.rewards for group in manifest.groups])
        shares = shard(
            # A group without advantages costs no work.
            [sum(group.lengths) if row.any() else 0 for group, row in zip(manifest.groups, advantages, strict=True)],
            config.training.minibatches,
            config.trainer_processes,
            seed=config.seed,
            step=manifest.step,
        )[self.rank]
        payloads = {
            index: unpack_group(self.controller.group(manifest.groups[index].group_id))
            for share in shares
            for index in share
        }
        return build_batch(
            manifest.step,
            shares,
            payloads,
            advantages,
            mask_truncated=config.algorithm.truncated == "mask",
        )

    def _spans(self, *marks: tuple[str, float]) -> None:
        """What this rank did between each mark and the next."""
        for (kind, start), (_, end) in pairwise(marks):
            self.timeline.span(kind, start, end, self.step)

    # -- what is told ------------------------------------------------------------------------------------------

    def _staleness(self, manifest: BatchManifest, batch: TrainingBatch) -> Counter[int]:
        """Sampled tokens of all ranks by staleness: version trained on - version that sampled them. Collective."""
        lags = manifest.step - 1 - batch.versions[batch.versions >= 0]
        counts = np.bincount(lags, minlength=manifest.step).astype(np.float64)
        total = self.engine.all_sum(counts)
        return Counter({lag: int(count) for lag, count in enumerate(total) if count})

    def _mismatch(self, batch: TrainingBatch, stats: StepStats) -> float | None:
        """Mean k3 of trainer against generator on the same weights, nats: over tokens of the version just trained on,
        else, now and then, over a sample of the newest tokens whose version is still in the store."""
        if stats.mismatch_kl is not None or self.step % self.config.tracking.table_every:
            return stats.mismatch_kl
        for number in sorted(set(batch.versions[batch.loss_mask].tolist()), reverse=True):
            try:
                published = weights.read_manifest(weights.version_folder(self.run_dir.weights, number))
                total, tokens = self.engine.mismatch(batch, weights.load(published), number)
            except StorageError:
                continue  # released meanwhile, or the base, which is a model folder
            if tokens:
                return total / tokens
        return None

    def _report(
        self,
        manifest: BatchManifest,
        stats: StepStats,
        staleness: Counter[int],
        times: dict[str, float],
        mismatch: float | None,
    ) -> None:
        token_mean = sum(lag * count for lag, count in staleness.items()) / max(staleness.total(), 1)
        sampled = sum(sum(group.lengths) for group in manifest.groups)
        queued = sum(sum(group.lengths) * (manifest.step - 1 - group.ready_version) for group in manifest.groups)
        values = times | {
            "loss/policy": stats.loss,
            "optimizer/grad_norm": stats.grad_norm,
            "optimizer/learning_rate": stats.learning_rate,
            "staleness/token_mean": token_mean,
            "staleness/queue_mean": queued / sampled,
            "staleness/in_flight_mean": token_mean - queued / sampled,
            "staleness/token_max": max(staleness, default=0),
        }
        if stats.trained_tokens:
            values |= {
                "loss/clip_fraction": stats.clip_fraction,
                "loss/cap_fraction": stats.cap_fraction,
                "loss/approx_kl": stats.approx_kl,
                "policy/entropy": stats.entropy,
                "policy/ess": stats.ess,
                "policy/importance_weight_max": stats.weight_max,
            }
        if mismatch is not None:
            values["mismatch/k3"] = mismatch
        now = time.time()
        rows = [MetricRow(key=key, step=self.step, value=float(value), time_s=now) for key, value in values.items()]
        counts = {str(lag): count for lag, count in sorted(staleness.items())}
        self.controller.metrics(rows)
        self.controller.document("staleness_histogram", self.step, {"counts": counts})

    # -- what is kept ------------------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Load the newest complete checkpoint; returns its step, 0 without one."""
        newest = checkpoint.newest(self.storage)
        if newest is None:
            return 0
        folder = self.run_dir.root / f"resume-{self.rank}"
        files = checkpoint.fetch(self.storage, newest, folder)
        state = EngineState(arrays=load_file(files[checkpoint.STATE]), scalars=newest.extra["engine"])
        self.engine.load_state(state)
        logger.info("resumed from the checkpoint of step %d", newest.step)
        return newest.step

    def _checkpoint(self) -> None:
        """State, optimiser and ledger of this step, committed by the manifest that is put last."""
        start = time.monotonic()
        state = self.engine.state()
        file = self.run_dir.root / checkpoint.STATE
        save_file({name: np.ascontiguousarray(array) for name, array in state.arrays.items()}, file)
        ledger = checkpoint.FileEntry(**self.controller.snapshot(self.step))
        checkpoint.save(
            self.storage,
            self.step,
            {checkpoint.STATE: file},
            {"engine": state.scalars, "config": self.config.to_dict()},
            uploaded={checkpoint.LEDGER: ledger},
        )
        self._saved = self.step
        self._spans(("checkpoint", start), ("", time.monotonic()))
        # Whichever checkpoint is left can be resumed from: what the oldest one would replay is kept.
        self.controller.committed(checkpoint.prune(self.storage, self.config.training.keep_checkpoints))

    def _save_model(self) -> str:
        """Put the final policy into the store as a transformers folder; returns its URL."""
        folder = self.run_dir.root / "final"
        tensors = {name: torch.from_numpy(array) for name, array in self.engine.weights().items()}
        write_model(folder, self.spec, tensors, Path(self.run_dir.info().model_path) / "tokenizer.json")
        final = self.storage.child("final")
        for file in sorted(folder.iterdir()):
            final.put_file(file, file.name)
        return final.url


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0, help="rank")
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    process.adopt(run.ready_file("trainer", arguments.index))
    torch.set_num_threads(1)
    try:
        trainer = Trainer(run, arguments.index)
        process.announce_ready(run.ready_file("trainer", arguments.index))
        trainer.train()
    except ArealError as error:
        raise SystemExit(f"areal: error: {error}") from None


if __name__ == "__main__":
    main()
