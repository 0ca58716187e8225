"""From a user message to the token ids that the model reads; the same in SFT, RL, evaluation and validation."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from training.config import PromptConfig
from training.errors import BadInput

Message = dict[str, str]
"""One message of a conversation: its `role` (system, user or assistant) and `content`."""


class PromptRenderer:
    """Applies the recipe's system message and chat template.

    The template's text is tokenized without the tokenizer's own special tokens, so that a beginning-of-text
    token stands there once, from the template, or not at all.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._template = config.chat_template or tokenizer.chat_template
        if self._template is None:
            raise BadInput(
                "prompt.chat_template is null and the tokenizer has no chat template; give a Jinja template, "
                "or `none` to show the question as plain text"
            )

    def text(self, prompt: str, context: Sequence[Message] = ()) -> str:
        """The exact text that the model continues; `context` are the messages before the user's last one.

        A system message in the context stands in for the recipe's. Raises BadInput for a context without a chat
        template.
        """
        if self._template == "none":
            if context:
                raise BadInput(
                    "prompt.chat_template = none: a conversation of several messages needs a chat template"
                )
            return (self.config.system or "") + prompt
        messages = [*context, {"role": "user", "content": prompt}]
        if self.config.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.config.system})
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        )

    def ids(self, prompt: str, context: Sequence[Message] = ()) -> list[int]:
        """Token ids of `text(prompt, context)`."""
        return self._encode(self.text(prompt, context))

    def completion_ids(self, completion: str) -> list[int]:
        """Token ids of a reference completion with the end token, which SFT trains too."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise BadInput("the tokenizer has no eos_token, so a completion's end can't be taught")
        return [*self._encode(completion), int(end)]

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
