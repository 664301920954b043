import json

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

from areal_core.errors import ModelError
from areal_core.models.tokenizer import CHARACTERS, EOS, PAD, ChatTemplate, Tokenizer, char_tokenizer
from tests.support.chat import CHAT, chat_folder


def test_every_character_is_a_token_and_comes_back(tmp_path):
    tokenizer = char_tokenizer()
    ids, end, pad = tokenizer.encode(CHARACTERS), tokenizer.token_id(EOS), tokenizer.token_id(PAD)
    assert len(ids) == len(set(ids)) == len(CHARACTERS) == tokenizer.vocab_size - 2
    assert not {end, pad} & set(ids)
    assert tokenizer.decode([*ids, end, pad]) == CHARACTERS
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("1/2=")
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.from_folder(tmp_path).encode(CHARACTERS) == ids


def test_a_missing_or_broken_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


PADDING = {
    "strategy": {"Fixed": 99}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 256, "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
        {"padding": PADDING},
        {"dropout": 0.9},
    ],
)
def test_settings_for_batches_change_no_text(tmp_path, settings):
    file = chat_folder(tmp_path) / "tokenizer.json"
    text, written = "Compute 1+1, then answer.", json.loads(file.read_text())
    written["model"] |= {"merges": [["1", "1"]], "vocab": written["model"]["vocab"] | {"11": 259}}
    (written["model"] if "dropout" in settings else written).update(settings)
    file.write_text(json.dumps(written))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for opening in (False, True):
        assert tokenizer.decode(tokenizer.encode(text, opening=opening)) == text
    assert {tokenizer.encode("11" * 20) for _ in range(5)} == {(259,) * 20}


@pytest.mark.parametrize("template", ["$A", "<|im_start|> $A", "<|im_start|> $A <|endoftext|>"])
def test_a_prompt_begins_as_in_transformers(tmp_path, template):
    from transformers import AutoTokenizer

    file = chat_folder(tmp_path) / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(file))
    marks = [(mark, inner.token_to_id(mark)) for mark in ("<|im_start|>", "<|endoftext|>")]
    inner.post_processor = processors.TemplateProcessing(template, special_tokens=marks)
    inner.save(str(file))
    tokenizer, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)("2+2=")["input_ids"]
    prompt = tokenizer.encode("2+2=", opening=True)
    assert list(prompt) == [token for token in theirs if token != 256]  # without an end, which nothing would follow
    assert tokenizer.encode(tokenizer.decode(prompt, special=True), opening=True) == prompt  # not twice
    assert tokenizer.decode(tokenizer.encode("2+2="), special=True) == "2+2="


def test_a_token_that_the_model_has_not_is_named(tmp_path):
    (chat_folder(tmp_path) / "config.json").write_text('{"vocab_size": 258}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<|im_start|>") == (257,)
    with pytest.raises(ModelError, match=r"of .* \(258\), got 258 \('<\|im_end\|>'\) for 'a<.*'; "):
        tokenizer.encode("a<|im_end|>b")


TALK = (
    {"role": "system", "content": "Answer in French."},
    {"role": "user", "content": "How many? "},
    {"role": "assistant", "content": "Deux."},
    {"role": "user", "content": "Sure?"},
)


@pytest.mark.parametrize("messages", [TALK, TALK[1:2]])
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_tokens_are_those_of_transformers(tmp_path, messages, thinking, generation_prompt):
    tokenizer = Tokenizer.from_folder(chat_folder(tmp_path))
    text = tokenizer.chat.render(messages, generation_prompt=generation_prompt, thinking=thinking)
    switch = {} if thinking is None else {"enable_thinking": thinking}
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        list(messages), add_generation_prompt=generation_prompt, return_dict=False, **switch
    )
    assert list(tokenizer.encode(text)) == theirs
    assert tokenizer.decode(theirs, special=True) == text
    assert "<|im_start|>" not in tokenizer.decode(theirs)


def test_a_template_is_found_wherever_a_folder_holds_it(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT}]
    assert ChatTemplate.from_folder(chat_folder(tmp_path / "named", named)).source == CHAT
    assert ChatTemplate.from_folder(chat_folder(tmp_path / "other", named[:1])) is None
    assert Tokenizer.from_folder(chat_folder(tmp_path / "none", None)).chat is None
    assert ChatTemplate.from_folder(tmp_path) is None
    own = chat_folder(tmp_path / "own")
    (own / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    template = ChatTemplate.from_folder(own)
    assert template.render(TALK, generation_prompt=True) == "Answer in French.<|im_end|>"  # it has no bos_token


@pytest.mark.parametrize("settings", [{}, {"bos_token": "<|endoftext|>"}, {"added_tokens_decoder": {}}])
def test_special_tokens_are_those_of_transformers(tmp_path, settings):
    file = chat_folder(tmp_path, "{{ bos_token }}{{ eos_token }}") / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    named = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(list(TALK), tokenize=False)
    assert ChatTemplate.from_folder(tmp_path).render(TALK, generation_prompt=False) == theirs


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{% if %}", "{{ nothing.at.all }}", "{{ 1 // 0 }}"]
)
def test_a_template_that_fails_is_one_error(tmp_path, template):
    with pytest.raises(ModelError, match=r"^the chat template fails: \w+: "):
        ChatTemplate(template, {}).render(TALK, generation_prompt=True)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="can't read its chat template"):
        ChatTemplate.from_folder(tmp_path)
