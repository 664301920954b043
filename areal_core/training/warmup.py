"""Supervised warm-up: make the embedded model that reinforcement learning starts from.

First, worked solutions teach the model to calculate step by step. Then a short mixture, mostly of direct completions,
hides that skill. The resulting model guesses: it is correct about as often as the shortest chains are drawn. Now and
then it works out the correct answer step by step. Reinforcement learning finds and reinforces that.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adam import adam

from areal_core.config.schema import RunConfig, load_file
from areal_core.launch import logs, process
from areal_core.models.folders import ModelSpec, init_weights, write_model
from areal_core.models.tokenizer import EOS, char_tokenizer
from areal_core.training import recipe
from areal_core.training.batching.packing import pack
from areal_core.training.model.forward import completion_logprobs

logger = logging.getLogger(__name__)

_REPORT_EVERY = 200  # steps
_GRAD_CLIP = 1.0


def embedded_spec(config: RunConfig) -> ModelSpec:
    """Return the embedded model's shape, from `model` in the configuration and the character tokenizer."""
    tokenizer, model = char_tokenizer(), config.model
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        vocab_size=tokenizer.vocab_size,
        hidden_size=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        intermediate_size=model.intermediate_size,
        qkv_bias=True,
        tie_embeddings=False,
        context=model.context,
        eos_token_ids=(tokenizer.token_id(EOS),),
    )


def warm_up(config: RunConfig) -> dict[str, Tensor]:
    """Train both stages and return the model weights. Deterministic on one machine with one thread."""
    spec, its = embedded_spec(config), config.warmup
    weights = {name: tensor.requires_grad_() for name, tensor in init_weights(spec, its.seed).items()}
    stages = {  # steps, sequences in a batch, share of direct completions, peak learning rate
        "worked": (its.worked_steps, its.worked_batch, 0.0, 2e-3),
        "direct": (its.direct_steps, 32, 0.8, 5e-4),  # a higher rate would undo the first stage
    }
    for stage, (steps, batch, share, peak) in stages.items():
        data = recipe.batches(config, steps=steps, batch=batch, direct_share=share, stream=stage)
        _train(spec, weights, stage, data, steps, peak)
    return {name: tensor.detach() for name, tensor in weights.items()}


def make_model(config: RunConfig, folder: Path) -> None:
    """Warm up and write a transformers folder, which appears whole or not at all."""
    weights = warm_up(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        tokenizer_file = made / "tokenizer.json"
        char_tokenizer().save(tokenizer_file)
        write_model(made, embedded_spec(config), weights, tokenizer_file)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(made, folder)


def _train(
    spec: ModelSpec, weights: dict[str, Tensor], stage: str, data: Iterator[recipe.Batch], steps: int, peak: float
) -> None:
    """Train one stage: maximum likelihood of the completions, averaged over a batch's completion tokens.

    Adam is called as a function: its class imports torch's compiler, which takes a second.
    """
    parameters = list(weights.values())
    means, squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    counts = [torch.zeros(()) for _ in parameters]
    for step, (tokens, lengths, prompt_lengths) in enumerate(data):
        logprobs, _ = completion_logprobs(spec, weights, pack(tokens, lengths, prompt_lengths, range(len(lengths))))
        loss = -logprobs.mean()
        gradients = list(torch.autograd.grad(loss, parameters))
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_((_GRAD_CLIP / (norm + 1e-6)).clamp(max=1.0))
        adam(
            parameters,
            gradients,
            means,
            squares,
            [],
            counts,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=recipe.learning_rate(peak, step, steps),
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
        if (step + 1) % _REPORT_EVERY == 0 or step + 1 == steps:
            logger.info("warm-up: %s completions, step %d of %d, loss %.3f", stage, step + 1, steps, loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m areal_core.training.warmup", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="resolved configuration, JSON")
    parser.add_argument("--out", required=True, type=Path, help="folder to write the model to")
    arguments = parser.parse_args()
    logs.start("warmup")
    process.tie_to_parent()
    torch.set_num_threads(1)
    # As use_deterministic_algorithms, which would import torch's compiler for a second.
    torch.set_deterministic_debug_mode("error")
    make_model(load_file(arguments.config), arguments.out)


if __name__ == "__main__":
    process.run_and_exit(main)
