"""A pretrained model on real text: the embedded engine says, token for token, what transformers says."""

import re
from pathlib import Path

import pytest
import torch

from areal_core.config.groups import ChatConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.models.gguf import convert
from areal_core.models.spec import read_arrays, read_spec
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import GenerationRequest
from tests.support.generation import by_transformers
from tests.support.offline import OfflineEngine

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".areal" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TIE = 1e-4  # nats between the two most probable tokens, below which rounding decides
PROMPTS, NEW = 8, 16  # completions, and tokens of each

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not FILE.exists(), reason="needs SmolLM2: `make train EXPERIMENT=smollm2` fetches it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("smollm2") / "model"
    convert(FILE, made)
    return made


def paragraphs(count):
    """The first ones of this project's documentation, of 100 to 400 characters each."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = (text for file in files for text in re.split(r"\n\s*\n", file.read_text()))
    return [" ".join(text.split()) for text in texts if 100 <= len(text) <= 400 and not text.startswith("|")][:count]


def test_greedy_completions_are_those_of_transformers(folder):
    spec, tokenizer = read_spec(folder), Tokenizer.from_folder(folder)
    engine = OfflineEngine(spec, read_arrays(folder, spec), slots=16, context=512)
    texts = paragraphs(PROMPTS)
    chat, plain = Dialogue(ChatConfig(enabled=True), tokenizer), Dialogue(ChatConfig(), tokenizer)
    prompts = [(chat if index % 2 else plain).prompt(text) for index, text in enumerate(texts)]
    assert len(prompts) == PROMPTS
    requests = [
        GenerationRequest(
            request_id=str(index), token_ids=prompt, n=1, max_tokens=NEW, seed=0,
            stop_token_ids=spec.eos_token_ids, greedy=True,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    reference = by_transformers(folder).double()  # in float32 its own rounding is as large as the engine's
    ties = tokens = 0
    deviations: list[torch.Tensor] = []
    for prompt, (completion,) in zip(prompts, engine.generate(requests), strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        behind = logprobs.max(dim=-1).values - chosen
        assert behind.max() < TIE, tokenizer.decode(completion.token_ids.tolist())
        ties, tokens = ties + int((behind > 0).sum()), tokens + len(behind)
        deviations.append((torch.from_numpy(completion.logprobs) - chosen).abs())
    assert tokens > PROMPTS * NEW / 2
    assert ties <= 1
    deviation = torch.cat(deviations)
    assert deviation.quantile(0.99) < 1e-4
    assert deviation.max() < 3e-4  # thirty layers of float32 round by as much, here and there
