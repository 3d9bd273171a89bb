"""From text to tokens, by tokenizers in folders and of names on the Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_cli.config.huggingface import is_hub_name
from diloco_cli.corpus import encoders
from diloco_cli.corpus.encoders import FolderEncoder, encoder_of, tokenizer_digest, tokenizer_folder
from diloco_cli.errors import NotFoundError, UsageError
from tests.hub_cache import COMMIT, snapshot_in
from tests.tokenizer import write_tokenizer


def test_bytes_need_no_tokenizer() -> None:
    assert [list(tokens) for tokens in encoder_of(None).encode([b"ab", b"\xff"])] == [[97, 98], [255]]


def test_a_folder_s_tokenizer_gives_its_tokens_its_size_and_what_ends_a_text(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, ["the", "cat", "sat"])
    encoder = FolderEncoder(folder)
    assert encoder.vocabulary == 5 and encoder.digest == tokenizer_digest(str(folder))
    assert [list(tokens) for tokens in encoder.encode([b"the cat", b"sat dog"])] == [[2, 3], [4, 0]]
    assert encoder.end == (1,)
    other = FolderEncoder(write_tokenizer(tmp_path / "other", ["the", "dog", "sat"]))
    assert other.digest != encoder.digest


def test_a_folder_without_a_config_ends_no_text(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path, ["a"]) / "tokenizer_config.json").unlink()
    assert FolderEncoder(tmp_path).end == ()


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel"])
def test_text_that_spells_a_special_token_stays_text_or_is_refused(tmp_path: Path, kind: str) -> None:
    """Refused where the model itself has the spelling as a word."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'diloco[hf]'")
    words = ["<unk>", "<e>", "a", " ", "<", "e", ">", "e>"]
    numbers, models = {word: number for number, word in enumerate(words)}, tokenizers.models
    made = tokenizers.Tokenizer(
        {
            "BPE": lambda: models.BPE(numbers, [], unk_token="<unk>"),
            "Unigram": lambda: models.Unigram([(word, -1.0) for word in words], unk_id=0),
            "WordLevel": lambda: models.WordLevel(numbers, unk_token="<unk>"),
        }[kind]()
    )
    if kind == "WordLevel":
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "<e>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    encoder = FolderEncoder(tmp_path)
    unknown, plain = ([words[n] for n in each] for each in encoder.encode([b"?", b"a"]))
    assert encoder.end == (1,) and plain == ["a"] and unknown == ["<unk>"]
    if kind == "BPE":
        assert "".join(words[n] for n in encoder.encode([b"a<e>a"])[0]) == "a<e>a"
    else:
        with pytest.raises(UsageError, match="becomes the special token '<e>'"):
            encoder.encode([b"a <e> a <e>"])


def test_what_is_no_tokenizer_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no tokenizer\.json") as missing:
        encoder_of(str(tmp_path))
    assert "save_pretrained" in str(missing.value.hint)
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(UsageError, match="no tokenizer"):
        encoder_of(str(tmp_path))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf"


def test_a_name_is_a_snapshot_of_the_cache_and_a_folder_itself(home: Path, tmp_path: Path) -> None:
    cached = write_tokenizer(snapshot_in(home, "maker/words"), ["a", "b"])
    for name in ("maker/words", "maker/words@main", f"maker/words@{COMMIT}"):
        assert tokenizer_folder(name) == cached
    encoder = encoder_of("maker/words")
    assert encoder.digest == tokenizer_digest(str(cached)) and encoder.end == (1,)
    here = write_tokenizer(tmp_path / "maker" / "words", ["c"])
    assert tokenizer_folder("maker/words").resolve() == here


def test_without_a_network_a_name_that_was_never_fetched_is_an_error_with_the_command(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("huggingface_hub", reason="pip install 'diloco[hf]'")

    def download(*_: object, **__: object) -> str:
        raise library.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(library, "hf_hub_download", download)
    with pytest.raises(NotFoundError, match="not in the Hub's cache, and the Hub cannot be reached"):
        tokenizer_folder("maker/words")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE is set") as caught:
        tokenizer_folder("maker/words@v2")
    assert "hf download maker/words tokenizer.json tokenizer_config.json --revision v2" in str(caught.value.hint)


def test_what_ends_a_text_is_fetched_too_unless_the_repository_has_none(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("huggingface_hub", reason="pip install 'diloco[hf]'")
    cached = snapshot_in(home, "maker/words")
    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        if file == encoders.TOKENIZER_CONFIG:
            raise library.errors.EntryNotFoundError("404")
        (write_tokenizer(cached, ["a"]) / encoders.TOKENIZER_CONFIG).unlink()
        return str(cached / file)

    monkeypatch.setattr(library, "hf_hub_download", download)
    assert encoder_of("maker/words@v2").end == ()
    assert asked == [("maker/words", encoders.TOKENIZER, "v2"), ("maker/words", encoders.TOKENIZER_CONFIG, COMMIT)]


def test_a_repository_that_is_known_to_have_no_config_is_used_without_a_network(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's cache keeps what it was told of a missing file."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached = write_tokenizer(snapshot_in(home, "maker/words"), ["a"])
    (cached / encoders.TOKENIZER_CONFIG).unlink()
    lacks = cached.parents[1] / ".no_exist" / COMMIT / encoders.TOKENIZER_CONFIG
    lacks.parent.mkdir(parents=True)
    lacks.touch()
    said: list[str] = []
    assert encoder_of("maker/words", said.append).end == () and not said
    assert tokenizer_folder("hf://maker/words") == cached


def test_a_config_that_cannot_be_fetched_is_told_of_and_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("huggingface_hub", reason="pip install 'diloco[hf]'")

    def download(*_: object, **__: object) -> str:
        raise library.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(library, "hf_hub_download", download)
    cached = write_tokenizer(snapshot_in(home, "maker/words"), ["a"])
    (cached / encoders.TOKENIZER_CONFIG).unlink()
    said: list[str] = []
    assert encoder_of("maker/words", said.append).end == ()
    assert said == [f"maker/words: its {encoders.TOKENIZER_CONFIG} cannot be fetched, so nothing is put between texts"]


def test_a_folder_that_is_mistyped_is_no_name_on_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match=f"no {encoders.TOKENIZER}") as caught:
        encoder_of("tokeniser")
    assert "hf://NAME" in (caught.value.hint or "")
    library = pytest.importorskip("huggingface_hub", reason="pip install 'diloco[hf]'")
    said: list[str] = []

    def download(name: str, *_: object, **__: object) -> str:
        said.append(f"asked for {name}")
        raise library.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(library, "hf_hub_download", download)
    with pytest.raises(NotFoundError, match="no folder of that name here"):
        encoder_of("hf://gpt2", said.append)
    assert said == ["fetching gpt2 from the Hub", "asked for gpt2"]


@pytest.mark.parametrize(
    ("text", "so"),
    [
        ("hf://gpt2", True), ("openai-community/gpt2", True), ("hf://gpt2@main", True), ("a/b@refs/pr/3", True),
        ("hf://a/b", True), ("gpt2", False), ("gpt2@main", False), ("hf://", False), ("gs://a/b", False),
        ("/a/b", False), ("./tok", False), ("../tok", False), ("a/b/c", False), ("a/..", False), ("", False),
    ],
)  # fmt: skip
def test_names_of_the_hub_are_told_from_paths(text: str, so: bool) -> None:
    assert is_hub_name(text) is so
