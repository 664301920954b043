"""The evaluator: scores published versions on the held-out prompts, beside the training.

    controller --GET /evaluation--> version -> published weights -> greedy completions -> verifier -> POST /evaluations

It runs an engine of its own, so that the generation servers never stop for it; its tokens are outside the ledger. Each
prompt gets one greedy completion; the score is the share that is correct.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from areal_core.api.controller_client import ControllerClient
from areal_core.config.schema import RunConfig
from areal_core.environments.environment import judge
from areal_core.environments.registry import open_verifier
from areal_core.environments.source import open_source
from areal_core.errors import ArealError, RunFinished
from areal_core.generation.engines.embedded import Engine
from areal_core.launch import logs, process
from areal_core.models.arrays import read_arrays
from areal_core.models.spec import check_weights, read_spec
from areal_core.models.tokenizer import Tokenizer
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Evaluation, GenerationRequest, Outcome, PolicyVersion

logger = logging.getLogger(__name__)


class Evaluator:
    """Scores versions of one model on one held-out set. Raises ModelError or StorageError for weights it can't load."""

    def __init__(self, config: RunConfig, model_path: str) -> None:
        self._config = config
        self._tokenizer = Tokenizer.from_folder(model_path)
        self._prompts = open_source(config, self._tokenizer).held_out()
        self._verify = open_verifier(config.environment, config.task)
        self._spec = read_spec(model_path)
        self._engine = Engine(
            self._spec,
            read_arrays(model_path, self._spec),
            slots=config.evaluation.slots,
            context=min(self._spec.context, config.task.max_prompt_tokens + config.task.max_new_tokens),
        )

    def score(self, version: PolicyVersion) -> Evaluation:
        """Greedy accuracy of `version`; version 0 is the model folder, the others are published weights."""
        start = time.monotonic()
        if version.version == 0:
            arrays = read_arrays(version.path, self._spec)
        else:
            arrays = weights.load(version)
            check_weights(self._spec, arrays)
        self._engine.swap(self._engine.prepare(arrays), version.version)
        completions = self._engine.generate(self._request(index) for index in range(len(self._prompts)))
        correct = no_result = tokens = 0
        for prompt, (completion,) in zip(self._prompts, completions, strict=True):
            verdict = judge(self._verify, self._tokenizer, prompt, completion)
            correct += verdict.outcome is Outcome.RIGHT
            no_result += verdict.score is None
            tokens += len(completion.token_ids)
        return Evaluation(
            version=version.version,
            sha256=version.sha256,
            accuracy=correct / max(1, len(self._prompts) - no_result),
            prompts=len(self._prompts),
            no_result=no_result,
            mean_tokens=tokens / len(self._prompts),
            wall_s=time.monotonic() - start,
        )

    def _request(self, index: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"held-out-{index}",
            token_ids=self._prompts[index].token_ids,
            n=1,
            max_tokens=self._config.task.max_new_tokens,
            seed=0,
            stop_token_ids=self._spec.eos_token_ids,
            greedy=True,
        )


def evaluate(run: RunDir) -> None:
    """Score the versions that the controller hands out, until it has no more."""
    controller = ControllerClient(run)
    evaluator = Evaluator(run.config(), run.info().model_path)
    timeline = TimelineWriter(run.timeline_file("evaluator"), cpu=time.process_time)
    process.announce_ready(run.ready_file("evaluator"))
    more = True
    while more:
        try:
            version = controller.next_evaluation()
        except RunFinished:
            return
        logs.at_step(version.version)
        start = time.monotonic()
        evaluation = evaluator.score(version)
        timeline.span("evaluate", start, time.monotonic(), version.version)
        logger.info("version %d: held-out accuracy %.3f", evaluation.version, evaluation.accuracy)
        more = controller.evaluated(evaluation)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0)
    run = RunDir(parser.parse_args().run_dir)
    logs.start("evaluator")
    process.adopt(run.ready_file("evaluator"))
    try:
        evaluate(run)
    except ArealError as error:
        logger.error("%s", error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
