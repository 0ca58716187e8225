import json
from collections import Counter

import pytest

from tests.shared import SHARED
from training.batches import Tree
from training.config import PreferencesConfig, PromptConfig, RewardsConfig
from training.data.files import read_records
from training.errors import BadInput
from training.preferences import (
    Pair,
    divide_pairs,
    pair_columns,
    pairs_from_rollouts,
    read_choices,
    read_pairs,
    write_pairs,
)
from training.prompts import PromptRenderer
from training.recorder import NullRecorder
from training.rewards import RewardSum
from training.rollout.protocol import Completion

DEMO = SHARED / "preferences" / "dpo_en_demo.json"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


def from_rows(tmp_path, *rows, **settings):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return from_file(path, path.name, **settings)


def from_file(path, name, **settings):
    config = PreferencesConfig(source="file", path=name, **settings)
    return read_choices(read_records(path, pair_columns(config), name), config)


def said(role, content):
    return {"role": role, "content": content}


def test_texts_messages_and_whole_conversations_mean_the_same(tmp_path):
    prompt = said("user", "2+2?")
    pairs, counts = from_rows(
        tmp_path,
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [prompt], "chosen": [said("assistant", "4")], "rejected": said("assistant", "5")},
        {
            "prompt": "2+2?",
            "chosen": [prompt, said("assistant", "4")],
            "rejected": [prompt, said("assistant", "5")],
        },
        {
            "prompt": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": "5",
        },
        {"prompt": "2+2?", "chosen": "4", "rejected": "4"},
    )
    assert pairs == [Pair("2+2?", "4", "5")] * 4
    assert counts == {"rows": 5, "equal": 1, "bad_rows": 0}


def test_earlier_messages_are_the_context_and_a_margin_is_read(tmp_path):
    conversation = [
        said("system", "Be brief."),
        said("user", "Hi"),
        said("assistant", "Hello"),
        said("user", "2+2?"),
    ]
    [pair], _ = from_rows(
        tmp_path,
        {"talk": conversation, "good": "4", "bad": "five", "gap": 1.5},
        prompt_column="talk",
        chosen_column="good",
        rejected_column="bad",
        margin_column="gap",
    )
    assert pair == Pair("2+2?", "4", "five", 1.5, tuple(conversation[:3]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'; it has 'prompt', 'chosen'"),
        ({"prompt": "a", "chosen": " ", "rejected": "c"}, "column 'chosen': holds ' '"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "column 'prompt': holds 3"),
        ({"prompt": [], "chosen": "b", "rejected": "c"}, "column 'prompt': holds an empty list"),
        (
            {"prompt": [said("tool", "a")], "chosen": "b", "rejected": "c"},
            "role is 'tool'; accepted: system, user",
        ),
        (
            {"prompt": [said("assistant", "a")], "chosen": "b", "rejected": "c"},
            "the assistant's, expected the user's",
        ),
        (
            {"prompt": "a", "chosen": [said("user", "b")], "rejected": "c"},
            "the user's, expected the assistant's",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": [said("user", "x"), said("assistant", "c")]},
            "column 'rejected': the messages before its last one are not the prompt's",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "gap": "far"},
            "column 'gap': holds 'far'; expected a number",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, row, message):
    settings = {"margin_column": "gap"} if "gap" in row else {}
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "gap": 1}
    with pytest.raises(BadInput) as error:
        from_rows(tmp_path, good, good, row, **settings)
    assert str(error.value).startswith("pairs.jsonl, line 3: ")
    assert message in str(error.value)


HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant: "


def test_dialogues_as_hh_writes_them(tmp_path):
    [pair], counts = from_rows(
        tmp_path, {"chosen": HH + "It is 4.\nSee?", "rejected": HH + "five"}, format="hh"
    )
    assert pair == Pair(
        "2+2?", "It is 4.\nSee?", "five", 0.0, (said("user", "Hi"), said("assistant", "Hello"))
    )
    assert counts == {"rows": 1, "equal": 0, "bad_rows": 0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": HH + "4", "rejected": "\n\nHuman: x\n\nAssistant: 5"}, "the messages before its last one are not"),
        ({"chosen": HH + "4", "rejected": HH}, "column 'rejected': holds ''"),
        ({"chosen": "4", "rejected": HH + "5"}, "column 'chosen': holds '4'; expected a dialogue that begins with"),
        ({"chosen": ["4"], "rejected": HH + "5"}, "column 'chosen': holds ['4']; expected a text"),
        ({"chosen": "\n\nAssistant: 4", "rejected": HH + "5"}, "one message alone"),
        ({"chosen": HH + "4\n\nHuman: no", "rejected": HH + "5"}, "its last message is the assistant's, expected the user's"),
    ],
)  # fmt: skip
def test_dialogues_that_make_no_pair_are_named_or_left_out(tmp_path, row, message):
    good = {"chosen": HH + "4", "rejected": HH + "5"}
    with pytest.raises(BadInput) as error:
        from_rows(tmp_path, good, row, format="hh")
    assert str(error.value).startswith("pairs.jsonl, line 2: column ") or "one message" in message
    assert message in str(error.value)
    pairs, counts = from_rows(tmp_path, good, row, format="hh", skip_bad_rows=1)
    assert (len(pairs), counts["bad_rows"]) == (1, 1)


def test_pairs_as_ultrafeedback_writes_them(tmp_path):
    row = {
        "prompt": "2+2?",
        "chosen": [said("user", "2+2?"), said("assistant", "4")],
        "rejected": [said("user", "2+2?"), said("assistant", "5")],
        "score_chosen": 8.5,
        "score_rejected": 4.0,
    }
    assert from_rows(tmp_path, row)[0] == [Pair("2+2?", "4", "5")]


def test_a_hub_source_needs_a_revision():
    with pytest.raises(ValueError, match="needs revision"):
        PreferencesConfig(source="hub", path="Anthropic/hh-rlhf")


def test_a_file_source_needs_a_path():
    with pytest.raises(ValueError, match="source file needs path"):
        PreferencesConfig(source="file")


@pytest.mark.skipif(not DEMO.is_file(), reason=f"no preference data at {DEMO}")
def test_peoples_choices_in_sharegpt_form_are_read_whole(tmp_path):
    pairs, counts = from_file(DEMO, str(DEMO), prompt_column="conversations")
    assert counts == {"rows": 300, "equal": 0, "bad_rows": 0}
    assert len(pairs) == 300
    first = json.loads(DEMO.read_text())[0]
    assert pairs[0].prompt == first["conversations"][-1]["value"]
    assert pairs[0].chosen == first["chosen"]["value"]
    assert sum(bool(pair.context) for pair in pairs) == 186
    splits = divide_pairs(pairs, 0.1)
    assert 10 < len(splits["validation"]) < 60
    for split, own in splits.items():
        write_pairs(tmp_path / f"{split}.parquet", own)
        assert read_pairs(tmp_path / f"{split}.parquet") == own


class Scripted:
    """An engine that says the same texts for every prompt; one marked with … is cut off."""

    def __init__(self, renderer, texts):
        self.renderer, self.texts, self.seeds = renderer, texts, []

    def generate(self, requests, sampling):
        self.seeds += [request.seed for request in requests]
        return [self._say(self.texts[i % len(self.texts)]) for i in range(len(requests))]

    def _say(self, text):
        ids = self.renderer.completion_ids(text.removesuffix("…"))
        return Completion(ids, [0.0] * len(ids), "length" if text.endswith("…") else "stop")


@pytest.fixture
def renderer(tokenizer):
    return PromptRenderer(tokenizer, PromptConfig(chat_template="none"))


ROWS = [
    {"prompt": f"{i}+1=", "completion": "", "answer": str(i + 1), "source": "sums", "id": f"{i}"}
    for i in range(3)
]


def rolled_out(renderer, texts, rows=ROWS, **settings):
    engine = Scripted(renderer, texts)
    config = PreferencesConfig(num_samples=len(texts), **settings)
    pairs, counts, rates = pairs_from_rollouts(
        rows, engine, renderer, RewardSum(["math"], None, RewardsConfig()), config, 1, NullRecorder()
    )
    assert [one.id for one in rates] == [row["id"] for row in rows]
    engine.rates = [(one.solved, one.samples) for one in rates]
    return pairs, counts, engine


def test_right_completions_are_preferred_to_wrong_ones_of_the_same_prompt(renderer):
    """Right for the second problem alone are `2` and `= 2`; a repeated text counts once, a cut off one not at all."""
    pairs, counts, engine = rolled_out(
        renderer, ["2", "7", "= 2", "7", "8…"], batch_size=6, max_pairs_per_problem=9
    )
    assert pairs == [Pair("1+1=", good, "7", 1.0) for good in ("2", "= 2")]
    assert counts == {
        "problems": 3, "completions": 15, "truncated": 3, "ungraded": 0, "problems_with_pairs": 1
    }  # fmt: skip
    assert len(set(engine.seeds)) == 15
    assert engine.rates == [(0, 5), (2, 5), (0, 5)]


def test_the_messages_before_a_problem_are_its_pairs_context(renderer, tokenizer):
    context = [said("user", "0+1="), said("assistant", "1")]
    rows = [{**ROWS[0], "context": context}]
    chat = PromptRenderer(
        tokenizer, PromptConfig(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    )
    pairs, _, _ = rolled_out(chat, ["1", "7"], rows)
    assert pairs == [Pair("0+1=", "1", "7", 1.0, tuple(context))]


def test_pairs_of_a_problem_are_bounded_and_drawn_from_the_seed(renderer):
    texts = ["2", "= 2", "=2", "7", "8", "9"]
    pairs, _, _ = rolled_out(renderer, texts, max_pairs_per_problem=3)
    again, _, _ = rolled_out(renderer, texts, max_pairs_per_problem=3, batch_size=6)
    assert pairs == again
    [(_, number)] = Counter(pair.prompt for pair in pairs if pair.prompt == "1+1=").items()
    assert number == 3
    assert len({pair.id for pair in pairs}) == len(pairs)


def test_no_prompt_is_in_both_splits_and_equal_pairs_count_once():
    pairs = [Pair(f"question {i // 2}", "yes", f"no {i % 2}") for i in range(400)]
    splits = divide_pairs([*pairs, *pairs[:50]], 0.25)
    train, validation = ({pair.prompt for pair in splits[split]} for split in ("train", "validation"))
    assert not train & validation
    assert sum(map(len, splits.values())) == 400
    assert 60 < len(splits["validation"]) < 140
    alone = divide_pairs(pairs[:7], 0.25)
    assert all(pair in splits[split] for split, own in alone.items() for pair in own)


def test_a_pair_is_a_tree_of_its_prompt_with_the_chosen_branch_first(renderer, tokenizer):
    ids = tokenizer("1+1=")["input_ids"]
    chosen, rejected = tokenizer("2")["input_ids"], tokenizer("33")["input_ids"]
    assert Pair("1+1=", "2", "33").tree(renderer) == Tree(ids, [[*chosen, 1], [*rejected, 1]])


def test_a_context_is_rendered_before_the_prompt_and_its_system_message_wins(tokenizer, renderer):
    chat = PromptRenderer(tokenizer, PromptConfig(chat_template=TEMPLATE, system="Be kind."))
    assert chat.text("c", [said("user", "a"), said("assistant", "b")]) == (
        "[system]Be kind.[user]a[assistant]b[user]c[assistant]"
    )
    assert chat.text("c", [said("system", "Be brief.")]) == "[system]Be brief.[user]c[assistant]"
    assert chat.text("c") == "[system]Be kind.[user]c[assistant]"
    with pytest.raises(BadInput, match="needs a chat template"):
        renderer.text("c", [said("user", "a")])
