"""Convert a task's text or chat messages into the prompt tokens of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_core.config.groups import ChatConfig
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, ModelError
from areal_core.models.spec import stop_token_ids
from areal_core.models.tokenizer import ChatTemplate, Message, Tokenizer

PromptContent = str | tuple[Message, ...]
"""Text of a task, or chat messages that end with the user's."""

_COMPLETION = "-- what the policy answered --"  # placeholder for a completion in a template, which may trim white space


class Dialogue:
    """The messages of one task, in the format of the `chat` settings.

    Raises ConfigError if the model has no template, ModelError if the template fails.
    """

    def __init__(self, chat: ChatConfig, tokenizer: Tokenizer) -> None:
        if chat.enabled and tokenizer.chat is None:
            raise ConfigError("task.chat.enabled: must be false, as the model's folder has no chat template, got true")
        self._chat = chat
        self._tokenizer = tokenizer
        self._template = tokenizer.chat if chat.enabled else None

    def prompt(self, content: PromptContent) -> tuple[int, ...]:
        """Encode the prompt up to the policy's first token.
        Messages with their own system prompt keep it, whatever task.chat.system is."""
        if self._template is None:
            return self._tokenizer.encode(as_text(content), opening=True)
        messages = [_user(content)] if isinstance(content, str) else list(content)
        opening = [] if messages[0]["role"] == "system" else self._opening()
        return self._tokenizer.encode(self._render(self._template, [*opening, *messages]))

    def message(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """Encode a message that follows the completion `after`.
        In a chat this includes the template's tokens between two answers, except an end token that the policy
        sampled."""
        if self._template is None:
            return self._tokenizer.encode(text)
        token_ids = self._following(self._template, _user(text))
        return token_ids[1:] if token_ids[:1] == tuple(after[-1:]) else token_ids

    def stop_token_ids(self, folder: str | Path) -> tuple[int, ...]:
        """The tokens that end a completion: the model's end tokens.
        If the chat template has none of them after an answer, the first special token there is added. Raises ModelError
        for unreadable end tokens."""
        ends = stop_token_ids(folder)
        if self._template is None:
            return ends
        try:
            following = (*self._following(self._template), *self._following(self._template, _user("?")))
        except ModelError:  # the template supports only one turn
            return ends
        marks = [token for token in following if self._tokenizer.is_special(token)]
        return ends if {*ends}.intersection(marks) else (*ends, *marks[:1])

    def _following(self, template: ChatTemplate, *messages: Message) -> tuple[int, ...]:
        """Encode the template's text between an answer and the policy's next turn, with these messages."""
        answered: Message = {"role": "assistant", "content": _COMPLETION}
        whole = self._render(template, [*self._opening(), _user("?"), answered, *messages])
        _, found, rest = whole.rpartition(_COMPLETION)
        if not found:
            raise ModelError("the chat template omits the policy's replies; use another chat template")
        return self._tokenizer.encode(rest)

    def _opening(self) -> list[Message]:
        return [] if self._chat.system is None else [{"role": "system", "content": self._chat.system}]

    def _render(self, template: ChatTemplate, messages: list[Message]) -> str:
        opened = messages[-1]["role"] == "user"
        return template.render(messages, generation_prompt=opened, thinking=self._chat.thinking)


def stops_by_task(config: RunConfig, tokenizer: Tokenizer, folder: str | Path) -> dict[str, tuple[int, ...]]:
    """The tokens that end a completion, by the names of the run's tasks.
    Raises ModelError if they are unreadable."""
    return {name: Dialogue(its.task.chat, tokenizer).stop_token_ids(folder) for name, its in config.by_task.items()}


def as_text(content: PromptContent) -> str:
    """The text, or the contents of all messages, separated by empty lines."""
    return content if isinstance(content, str) else "\n\n".join(message["content"] for message in content)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
