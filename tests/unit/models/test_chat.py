"""Chat templates are rendered as transformers renders them, from wherever a folder holds them."""

import json

import pytest
from transformers import AutoTokenizer

from areal_core.errors import ModelError
from areal_core.models.chat import ChatTemplate
from areal_core.models.tokenizer import Tokenizer
from tests.support.chat import CHAT, chat_folder

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
    with pytest.raises(ModelError, match="its chat template is not readable"):
        ChatTemplate.from_folder(tmp_path)
