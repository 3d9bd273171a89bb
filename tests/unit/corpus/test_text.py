"""Which files a pattern names, and the pieces in which they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.corpus import text as text_module
from diloco_cli.corpus.text import TextFile, digest_of_sources, find_sources, fixed_folder, pieces
from diloco_cli.errors import NotFoundError, UsageError


def corpus(folder: Path) -> Path:
    for name, words in (("b.txt", "two"), ("a/c.txt", "three"), ("a.txt", "one"), (".git/d.txt", "no"), ("e.txt", "")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    return folder


def test_files_are_found_by_pattern_folder_or_name_in_an_order_of_their_names(tmp_path: Path) -> None:
    folder = corpus(tmp_path)
    names = [source.name for source in find_sources([f"{folder}/**/*.txt"])]
    assert names == ["a.txt", "a/c.txt", "b.txt"], "no empty ones, none that begin with a dot"
    assert [source.name for source in find_sources([str(folder)])] == names
    assert [source.name for source in find_sources([str(folder / "b.txt"), str(folder / "a.txt")])] == [
        "b.txt",
        "a.txt",
    ]


@pytest.mark.parametrize(("pattern", "said"), [("nothing/*.txt", "matches no file"), ("e.txt", "holds no text")])
def test_a_pattern_without_text_is_refused(tmp_path: Path, pattern: str, said: str) -> None:
    with pytest.raises(NotFoundError, match=said):
        find_sources([str(corpus(tmp_path) / pattern)])


def test_the_folder_before_a_pattern_is_what_a_machine_consents_to() -> None:
    assert fixed_folder("/data/corpus/**/*.txt") == Path("/data/corpus")
    assert fixed_folder("/data/a.txt") == Path("/data/a.txt")


@pytest.mark.parametrize("pattern", ["*/../../secret/*.txt", "*", "**/*.txt", "b.*"])
def test_no_pattern_leads_out_of_its_folder(tmp_path: Path, pattern: str) -> None:
    """Neither by `..`, nor by a link, a folder named `*` included."""
    shared = corpus(tmp_path / "shared")
    secret = corpus(tmp_path / "secret")
    (shared / "*").symlink_to(secret)
    (shared / "b.md").symlink_to(secret / "b.txt")
    (shared / "a.md").symlink_to(shared / "a.txt")
    with pytest.raises(UsageError, match=r"behind a wildcard|leads out of"):
        find_sources([str(shared / pattern)])
    assert find_sources([f"{shared}/a*.md"]), "a link within it"


def test_what_is_named_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(corpus(tmp_path / "real"))
    assert find_sources([str(tmp_path / "link")]) and find_sources([f"{tmp_path}/link/*.txt", f"{tmp_path}/link/b.txt"])


def test_a_file_that_changed_gives_another_digest(tmp_path: Path) -> None:
    folder = corpus(tmp_path)
    before = digest_of_sources(find_sources([str(folder)]))
    assert digest_of_sources(find_sources([f"{folder}/**/*.txt"])) == before
    (folder / "b.txt").write_text("too long")
    assert digest_of_sources(find_sources([str(folder)])) != before


@settings(max_examples=80, deadline=None)
@given(texts=st.lists(st.text(alphabet="aä漢😀\n", min_size=1, max_size=60), min_size=1, max_size=3), data=st.data())
def test_pieces_are_all_of_the_text_and_the_same_from_any_piece_on(tmp_path_factory, texts, data):
    folder = tmp_path_factory.mktemp("pieces")
    sources = []
    for number, words in enumerate(texts):
        path = folder / str(number)
        path.write_bytes(words.encode())
        sources.append(TextFile(str(number), path, path.stat().st_size, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE_BYTES", 11)
        whole = list(pieces(sources))
        assert b"".join(piece.text for piece in whole) == "".join(texts).encode()
        assert [piece.file for piece in whole if piece.is_last] == list(range(len(texts)))
        assert all(piece.text.decode() is not None for piece in whole), "cut between characters"
        stop = data.draw(st.integers(0, len(whole) - 1))
        assert list(pieces(sources, whole[stop].file, whole[stop].end)) == whole[stop + 1 :]
