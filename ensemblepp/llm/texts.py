"""Prompts and responses as one text: plain strings, or chats through the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ensemblepp.errors import ParameterError

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
"""A text, or a chat: [{"role": "user", "content": "..."}, ...]."""


def join(tokenizer: Any, prompt: Prompt, response: str) -> str:
    """Return prompt and response as the one text that the backbone reads.

    A string prompt is continued as it stands; a chat goes through the chat template with the response as the
    assistant's turn. A template that writes the beginning-of-text token leaves it to the tokenizer, which adds it once.

    Raises:
        ParameterError: A prompt or response of another type, or a chat for a tokenizer without a template.
    """
    if not isinstance(response, str):
        raise ParameterError("response", "a reward model", "be a string", repr(response))
    if isinstance(prompt, str):
        return prompt + response
    messages = check_chat(prompt)
    if not getattr(tokenizer, "chat_template", None):
        raise ParameterError(
            "prompt",
            "a reward model",
            "be a string, since the tokenizer has no chat template",
            "a list of messages",
            "Set tokenizer.chat_template or join the messages yourself.",
        )
    text: str = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": response}], tokenize=False)
    begin, begin_id = tokenizer.bos_token, tokenizer.bos_token_id
    adds_it = begin is not None and tokenizer("")["input_ids"][:1] == [begin_id]
    return text.removeprefix(begin) if adds_it else text


def check_chat(prompt: object) -> list[dict[str, str]]:
    """Return a chat as plain dictionaries.

    Raises:
        ParameterError: Not a non-empty sequence of messages with role and content.
    """
    messages = list(prompt) if isinstance(prompt, Sequence) else []
    good = messages and all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in messages
    )
    if not good:
        rule = "be a string or a non-empty list of messages with role and content"
        raise ParameterError("prompt", "a reward model", rule, repr(prompt))
    return [dict(each) for each in messages]
