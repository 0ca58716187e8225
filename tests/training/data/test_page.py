"""The rows of docs/data.md become what it shows."""

import json
import re

import pytest

from tests.shared import ROOT
from training.config import PreferencesConfig, SourceConfig
from training.data.files import read_records
from training.data.formats import FORMATS
from training.data.sources import read_examples
from training.preferences import pair_columns, read_choices

PAGE = (ROOT / "docs" / "data.md").read_text()
BLOCK = re.compile(r"\*\*([\w' -]+)\*\*[^\n]*(?:\n[^\n`*]+)*\n\n```jsonl\n(.*)\n(.*)\n```")
SHOWN = {name: (row, made) for name, row, made in BLOCK.findall(PAGE)}
PAIRS = {
    "Plain": {},
    "UltraFeedback": {},
    "LLaMA-Factory's ShareGPT pairs": {"prompt_column": "conversations"},
    "HH": {"format": "hh"},
}


def test_every_format_is_shown():
    assert set(SHOWN) == (FORMATS.keys() - {"reasoning_gym"}) | PAIRS.keys()
    assert all(f"| `{name}` |" in PAGE for name in FORMATS)
    assert all(f"`{hub}`" in PAGE for form in FORMATS.values() for hub in form.hub)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"reasoning_gym"}))
def test_a_row_becomes_the_example_beside_it(tmp_path, name):
    row, example = SHOWN[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    [made] = read_examples(SourceConfig(kind="file", path=str(path), format=name), 1)
    shown = {key: value for key, value in made._asdict().items() if value not in (None, ())}
    assert json.loads(json.dumps(shown)) == json.loads(example)


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_row_becomes_the_pair_beside_it(tmp_path, name):
    row, pair = SHOWN[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    config = PreferencesConfig(source="file", path=str(path), **PAIRS[name])
    [made], _ = read_choices(read_records(path, pair_columns(config)), config)
    assert json.loads(pair) == {
        "prompt": made.prompt,
        "chosen": made.chosen,
        "rejected": made.rejected,
        "context": list(made.context),
    }
