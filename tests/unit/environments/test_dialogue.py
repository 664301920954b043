"""What the policy is fed: the text alone, or the turns of its model's chat."""

import json

import pytest

from areal_core.config.groups import ChatConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.errors import ConfigError, ModelError
from areal_core.models.spec import stop_token_ids
from areal_core.models.tokenizer import Tokenizer
from tests.support.chat import CHAT, chat_folder

END = "<|im_end|>"


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(chat_folder(tmp_path))


def spelt(tokenizer, token_ids):
    return tokenizer.decode(token_ids, special=True)


ASKED = "<|im_start|>user\nWhy?<|im_end|>\n"
OPENED = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("settings", "fed"),
    [
        ({}, f"<|im_start|>system\nBe brief.<|im_end|>\n{ASKED}{OPENED}"),
        ({"system": "Think."}, f"<|im_start|>system\nThink.<|im_end|>\n{ASKED}{OPENED}"),
        ({"system": "", "thinking": True}, f"<|im_start|>system\n<|im_end|>\n{ASKED}{OPENED}"),
        ({"system": "", "thinking": False}, f"<|im_start|>system\n<|im_end|>\n{ASKED}{OPENED}<think>\n\n</think>\n\n"),
    ],
)
def test_a_prompt_is_a_message_of_the_user(tokenizer, settings, fed):
    assert spelt(tokenizer, Dialogue(ChatConfig(enabled=True, **settings), tokenizer).prompt("Why?")) == fed


def test_messages_are_fed_as_they_are_with_their_own_system_prompt(tokenizer):
    asked = (
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "Really?"},
    )
    rest = f"{ASKED}<|im_start|>assistant\nSo.<|im_end|>\n<|im_start|>user\nReally?<|im_end|>\n{OPENED}"
    dialogue = Dialogue(ChatConfig(enabled=True, system="Think."), tokenizer)
    assert spelt(tokenizer, dialogue.prompt(asked)) == f"<|im_start|>system\nThink.<|im_end|>\n{rest}"
    own = ({"role": "system", "content": "Be kind."}, *asked)
    assert spelt(tokenizer, dialogue.prompt(own)) == f"<|im_start|>system\nBe kind.<|im_end|>\n{rest}"
    plain = Dialogue(ChatConfig(system="Think."), tokenizer)
    assert spelt(tokenizer, plain.prompt(own)) == "Be kind.\n\nWhy?\n\nSo.\n\nReally?"


def test_a_conversation_in_pieces_is_the_whole_one(tokenizer):
    dialogue = Dialogue(ChatConfig(enabled=True), tokenizer)
    for answer in (f"Two.{END}", "Tw"):  # ended by the policy, and cut off
        completion = tokenizer.encode(answer)
        whole = (*dialogue.prompt("How many?"), *completion, *dialogue.message("Sure?", completion))
        messages = [
            {"role": role, "content": text}
            for role, text in (("user", "How many?"), ("assistant", answer.removesuffix(END)), ("user", "Sure?"))
        ]
        assert spelt(tokenizer, whole) == tokenizer.chat.render(messages, generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "named", "ends"),
    [
        (CHAT, 256, (256, 258)),  # turns end on another token than the model
        (CHAT, [256, 258], (256, 258)),
        (CHAT.replace("<|im_end|>", "<|endoftext|>"), 256, (256,)),
        (CHAT.replace("<|im_end|>", ""), 256, (256, 257)),  # the next turn's begin is the end of one
        (CHAT.replace("<|im_end|>", "").replace("<|im_start|>", "~"), 256, (256,)),
        (CHAT + "{% if messages[-1].role == 'assistant' %}<|endoftext|>{% endif %}", 256, (256,)),  # of the last turn
        ("{{ messages[0].content }}", 256, (256,)),
        ("{{ raise_exception('one turn') if messages | length > 1 }}{{ messages[0].content }}", 256, (256,)),
    ],
)
def test_completions_end_as_the_template_ends_turns(tmp_path, template, named, ends):
    tokenizer = Tokenizer.from_folder(chat_folder(tmp_path, template))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 259, "eos_token_id": named}))
    assert Dialogue(ChatConfig(enabled=True), tokenizer).stop_token_ids(tmp_path) == ends
    assert Dialogue(ChatConfig(), tokenizer).stop_token_ids(tmp_path) == stop_token_ids(tmp_path)


def test_a_chat_without_a_usable_template_is_refused(tmp_path):
    bare = Tokenizer.from_folder(chat_folder(tmp_path / "bare", None))
    with pytest.raises(ConfigError, match=r"^task\.chat\.enabled: must be false, .* no chat template, got true"):
        Dialogue(ChatConfig(enabled=True), bare)
    forgetful = Tokenizer.from_folder(chat_folder(tmp_path / "forgetful", "{{ messages[-1].content }}"))
    dialogue = Dialogue(ChatConfig(enabled=True), forgetful)
    assert spelt(forgetful, dialogue.prompt("Why?")) == "Why?"
    with pytest.raises(ModelError, match="omits the policy's replies"):
        dialogue.message("Sure?", ())
