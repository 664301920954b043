import pytest
import torch

from areal_core.config.fields import merge
from areal_core.config.schema import load
from areal_core.environments.datasets import is_held_out
from areal_core.models.spec import read_spec
from areal_core.models.tokenizer import Tokenizer, char_tokenizer
from areal_core.training import recipe
from areal_core.training.recipe import cache_key
from areal_core.training.warmup import embedded_spec, make_model, warm_up

SMALL = {
    "model": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 24},
    "task": {"max_operations": 3, "max_prompt_tokens": 8, "max_new_tokens": 24},
    "warmup": {"worked_steps": 30, "worked_batch": 8, "direct_steps": 4},
}


def small(dotted=None, value=None):
    return load(SMALL if dotted is None else merge(SMALL, dotted, value))


def texts(batch):
    tokens, lengths, prompt_lengths = batch
    ends = lengths.cumsum()
    for end, length, prompt in zip(ends, lengths, prompt_lengths, strict=True):
        sequence = tokens[end - length : end].tolist()
        yield char_tokenizer().decode(sequence[:prompt]), char_tokenizer().decode(sequence[prompt:]), sequence[-1]


def drawn(config, share, steps=20):
    found = recipe.batches(config, steps=steps, batch=16, direct_share=share, stream="test")
    return [row for batch in found for row in texts(batch)]


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_batches_are_solved_training_chains_some_of_them_direct(share):
    rows = drawn(small(), share)
    for prompt, completion, last in rows:
        assert prompt.endswith("=")
        assert not is_held_out(prompt)
        assert completion.rpartition("#")[2].isdigit()
        assert last == embedded_spec(small()).eos_token_ids[0]
    direct = sum(completion.startswith("#") for _, completion, _ in rows) / len(rows)
    assert direct == pytest.approx(share, abs=0.0 if share in (0.0, 1.0) else 0.08)
    assert drawn(small(), share, steps=3) == rows[: 3 * 16]


def test_the_same_seed_gives_the_same_weights_and_another_does_not():
    torch.set_num_threads(1)
    one, two, other = warm_up(small()), warm_up(small()), warm_up(small("warmup.seed", 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_the_model_is_a_folder_that_transformers_loads(tmp_path):
    import transformers  # takes seconds

    config, folder = small("warmup.worked_steps", 1), tmp_path / "cache" / "model"
    make_model(config, folder)
    (folder / "left-over").touch()
    make_model(config, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert not (folder / "left-over").exists()
    spec = read_spec(folder)
    assert spec == embedded_spec(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = char_tokenizer().encode("1-1-7=")
    assert tuple(tokenizer("1-1-7=")["input_ids"]) == Tokenizer.from_folder(folder).encode("1-1-7=") == ids
    assert (tokenizer.eos_token_id,) == spec.eos_token_ids
    assert tokenizer.decode([*char_tokenizer().encode("#3"), tokenizer.eos_token_id], skip_special_tokens=True) == "#3"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id in (spec.eos_token_ids[0], list(spec.eos_token_ids))


DECIDES = {
    "model.hidden_size": 32, "model.context": 200, "task.max_operations": 2, "task.length_decay": 0.5,
    "warmup.seed": 9, "warmup.worked_batch": 4, "warmup.direct_steps": 2,
}  # fmt: skip
OTHERS = {"seed": 9, "training.steps": 3, "task.max_new_tokens": 30, "task.held_out": 7}


def test_the_cache_key_is_of_the_settings_that_decide_the_weights():
    key = cache_key(small())
    assert {field for field, value in (DECIDES | OTHERS).items() if cache_key(small(field, value)) != key} == {*DECIDES}
