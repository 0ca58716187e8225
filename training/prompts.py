"""From a user message to the token ids that the model reads; the same in SFT, RL, evaluation and validation."""

from __future__ import annotations

from collections.abc import Sequence

import transformers

from training.config import PromptConfig
from training.errors import BadInput

Message = dict[str, str]
"""One message of a conversation: its `role` (system, user or assistant) and `content`."""


class PromptRenderer:
    """Applies the recipe's system message and chat template.

    The template's text is tokenized without the tokenizer's own special tokens, so that a beginning-of-text
    token stands there once, from the template, or not at all.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: PromptConfig) -> None:
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
        return self.text_ids(self.text(prompt, context))

    def completion_ids(self, completion: str) -> list[int]:
        """Token ids of a reference completion with the end token, which SFT trains too."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise BadInput("the tokenizer has no eos_token, so a completion's end can't be taught")
        return [*self.text_ids(completion), int(end)]

    def turn_end(self) -> str:
        """The text by which the chat template closes an assistant's message; without one, the end token's.

        Raises BadInput when there is neither.
        """
        probe = "x"
        if self._template != "none":
            asked = [{"role": "user", "content": probe}]
            whole = self.tokenizer.apply_chat_template(
                [*asked, {"role": "assistant", "content": probe}],
                chat_template=self._template,
                tokenize=False,
            )
            prompt = self.tokenizer.apply_chat_template(
                asked, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
            if str(whole).startswith(f"{prompt}{probe}") and len(str(whole)) > len(f"{prompt}{probe}"):
                return str(whole)[len(f"{prompt}{probe}") :]
        if self.tokenizer.eos_token is None:
            raise BadInput("the tokenizer has no eos_token, so a completion's end can't be shown")
        return str(self.tokenizer.eos_token)

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text as it stands; special tokens written in it are read as such."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
