"""Text as tokens and back, token by token."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings
from diloco_cli.corpus.encoders import tokenizer_digest
from diloco_cli.errors import UsageError
from diloco_cli.inference.vocabulary import Bytes, TextStream, Words, vocabulary_of

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install 'diloco[hf]'"
)
OWN_DATA = RunSettings(
    name="x", model=ModelSettings(preset="gpt-pico"), data=DataSettings(preset=None, entrypoint="a:b")
)
PRESET_DATA = RunSettings(name="x", model=ModelSettings(preset="gpt-pico"), data=DataSettings(preset="python-stdlib"))


def words_in(folder: Path) -> Path:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"[UNK]": 0, "<end>": 1, "a": 2, "b": 3}
    plain = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="<end>").save_pretrained(folder)
    return folder


def shown(tokens: list[int]) -> list[str]:
    stream = TextStream(Bytes())
    return [*(stream.add(token) for token in tokens), stream.rest()]


def test_a_character_is_shown_once_all_its_bytes_are_there() -> None:
    assert shown(list("aé€".encode())) == ["a", "", "é", "", "", "€", ""]


def test_bytes_that_are_no_text_are_shown_as_such_and_the_rest_at_the_end() -> None:
    assert "".join(shown([0xFF, ord("a"), 0xC3])) == "\ufffda\ufffd"


def test_bytes_are_taken_where_a_run_trains_on_them_or_a_model_knows_no_more() -> None:
    assert isinstance(vocabulary_of(PRESET_DATA, None, 50_000), Bytes)
    assert isinstance(vocabulary_of(OWN_DATA, None, 256), Bytes)
    with pytest.raises(UsageError, match="has 300 tokens") as caught:
        vocabulary_of(OWN_DATA, None, 300)
    assert "--tokenizer FOLDER" in (caught.value.hint or "")


@needs_tokenizers
def test_a_tokenizers_folder_says_what_tokens_are(tmp_path: Path) -> None:
    found = vocabulary_of(OWN_DATA, str(words_in(tmp_path)), 4)
    assert found.encode("a b a") == [2, 3, 2] and found.decode([2, 3, 1]) == "a b" and found.end == found.begin == 1


@needs_tokenizers
def test_what_a_tokenizer_puts_before_a_text_stands_before_no_text_that_shards_were_made_of(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    path = words_in(tmp_path) / "tokenizer.json"
    plain = Tokenizer.from_file(str(path))
    plain.post_processor = processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", 1)])
    plain.save(str(path))
    assert Words(tmp_path).encode("a b") == [1, 2, 3]
    shards = DataSettings(tokens="file:///tokens", args={"tokenizer": tokenizer_digest(str(tmp_path))})
    found = vocabulary_of(replace(OWN_DATA, data=shards), str(tmp_path), 4)
    assert found.encode("a b") == [2, 3], "training on shards of text has never seen what is put before one"
    assert found.begin == 1, "a text begins where another has ended"


@needs_tokenizers
def test_another_tokenizer_than_the_data_s_is_refused(tmp_path: Path) -> None:
    shards = DataSettings(tokens="file:///tokens", args={"tokenizer": "blake3-abc"})
    with pytest.raises(UsageError, match="wrong tokenizer: the run's data were made by another one") as caught:
        vocabulary_of(replace(OWN_DATA, data=shards), str(words_in(tmp_path)), 4)
    assert "of digest blake3-abc" in str(caught.value.hint)


@needs_tokenizers
def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="finds no tokenizer"):
        Words(tmp_path)
    with pytest.raises(UsageError, match="no folder"):
        Words(tmp_path / "nowhere")


def test_without_transformers_a_tokenizer_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs transformers"):
        Words(tmp_path)
