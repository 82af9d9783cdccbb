"""The text side of stage 0: chat messages to token ids, token ids to text. No torch.

The tokenizer is loaded by transformers' generic class from `tokenizer.json` (about 2 s less at start than
AutoTokenizer, which brings torch along), and templates are rendered in transformers' sandbox. Its
`sanitize_control_tokens` keeps what users write from becoming control tokens: special tokens, and added tokens that
the template itself writes, are encoded as plain text wherever they occur in a message.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from swarmnode.compute.chat_shapes import chat_shapes
from swarmnode.compute.detokenizer import IncrementalDetokenizer, Vocabulary
from swarmnode.errors import InvalidModel, InvalidRequest, InvalidTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles enter templates as text ('<|' + role + '|>'), so only known ones may."""
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)


class TextPipeline:
    """A model's tokenizer and chat template. One thread may encode while another one decodes."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds tokenizer.json and tokenizer_config.json (and maybe chat_template.jinja)."""
        if not (folder / "tokenizer.json").is_file():
            raise InvalidModel(f"the model has no tokenizer.json in {folder.name}/; import it again")
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidModel(f"the model's tokenizer cannot be read: {str(error)[:500]}") from error
        self._template = self._find_template()
        self.vocabulary = Vocabulary(self._tokenizer.backend_tokenizer)

    def encode_chat(self, messages: Sequence[Message], template_kwargs: Mapping[str, bool] | None = None) -> list[int]:
        """Prompt ids of a conversation, ending where the assistant's answer begins; raises InvalidTemplate."""
        kwargs = dict(template_kwargs or {})
        _check_arguments(messages, kwargs)
        shape = self._fitting_shape(messages, kwargs)
        try:
            ids = self._tokenizer.apply_chat_template(
                shape,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=True,
                sanitize_control_tokens=True,
                return_dict=False,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidTemplate(_template_message(error)) from error
        return [int(token) for token in ids]

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh one for a reply."""
        return IncrementalDetokenizer(self.vocabulary)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a whole reply, special tokens skipped."""
        return self.vocabulary.decode_all(ids)

    def _find_template(self) -> str | None:
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template if isinstance(template, str) else None

    def _fitting_shape(self, messages: Sequence[Message], kwargs: Mapping[str, bool]) -> list[dict[str, Any]]:
        """The first way to lay the conversation out that the template takes and that loses no system message."""
        if self._template is None:
            raise InvalidTemplate("this model has no chat template, so it cannot take chat messages; use a chat model")
        first_error: Exception | None = None
        rendered_shape: list[dict[str, Any]] | None = None
        system_texts = [str(m.get("content") or "").strip() for m in messages if m["role"] in ("system", "developer")]
        for shape in chat_shapes(messages, keep_developer="developer" in self._template):
            try:
                text = self._tokenizer.apply_chat_template(
                    shape, chat_template=self._template, add_generation_prompt=True, tokenize=False, **kwargs
                )
            except (TemplateError, ValueError, TypeError, KeyError) as error:
                first_error = first_error or error
                continue
            if holds_all(text, system_texts):
                return shape
            rendered_shape = rendered_shape or shape
        if rendered_shape is not None:
            return rendered_shape
        raise InvalidTemplate(_template_message(first_error)) from first_error


def holds_all(text: str, parts: Sequence[str]) -> bool:
    """Whether every part occurs in `text`. Each is first looked for behind the one before, where templates put it:
    thousands of parts from the start each would take seconds of the thread that all replies share."""
    end = 0
    for part in parts:
        at = text.find(part, end)
        if at < 0:
            at = text.find(part)
        if at < 0:
            return False
        end = at + len(part)
    return True


def _check_arguments(messages: Sequence[Message], kwargs: Mapping[str, bool]) -> None:
    for message in messages:
        if message.get("role") not in ROLES:
            raise InvalidRequest(f"role {str(message.get('role'))[:40]!r} is not one of {', '.join(ROLES)}")
    for name in kwargs:
        if name in _RESERVED:
            raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")


def _template_message(error: Exception | None) -> str:
    return f"the model's chat template refused the messages: {str(error)[:500]}"
