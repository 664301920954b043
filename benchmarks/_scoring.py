"""Scores the held-out accuracy of versions in the training process, between two steps."""

from __future__ import annotations

import asyncio

from areal_core.config.schema import RunConfig
from areal_core.environments.registry import open_judge
from areal_core.environments.source import open_source
from areal_core.models.spec import read_arrays, read_spec
from areal_core.models.tokenizer import Tokenizer
from areal_core.storage import weights
from areal_core.types import GenerationRequest, Outcome, PolicyVersion
from tests.support.offline import OfflineEngine


class Scorer:
    """Scores versions of one model with one greedy completion per held-out prompt."""

    def __init__(self, config: RunConfig, model_path: str) -> None:
        self._tokenizer = Tokenizer.from_folder(model_path)
        self._prompts = open_source(config, self._tokenizer).held_out()
        self._judge = open_judge(config)
        self._spec = read_spec(model_path)
        self._engine = OfflineEngine(
            self._spec,
            read_arrays(model_path, self._spec),
            slots=config.evaluation.slots,
            context=min(self._spec.context, config.task.max_prompt_tokens + config.task.max_new_tokens),
        )
        self._requests = [
            GenerationRequest(
                request_id=f"held-out-{prompt.index}",
                token_ids=prompt.token_ids,
                n=1,
                max_tokens=config.task.max_new_tokens,
                seed=0,
                stop_token_ids=self._spec.eos_token_ids,
                greedy=True,
            )
            for prompt in self._prompts
        ]

    def accuracy(self, version: PolicyVersion) -> float:
        """Share of prompts with a correct completion; version 0 is the model folder."""
        arrays = read_arrays(version.path, self._spec) if version.version == 0 else weights.load(version)
        self._engine.swap(self._engine.prepare(arrays), version.version)
        completions = self._engine.generate(self._requests)
        verdicts = [
            asyncio.run(
                self._judge(
                    prompt,
                    self._tokenizer.decode(completion.token_ids.tolist()),
                    truncated=completion.finish_reason == "length",
                )
            )
            for prompt, (completion,) in zip(self._prompts, completions, strict=True)
        ]
        return sum(verdict.outcome is Outcome.CORRECT for verdict in verdicts) / len(verdicts)
