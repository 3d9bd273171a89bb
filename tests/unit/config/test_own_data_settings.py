"""The keys of own data: places become absolute, and what has no effect is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import UsageError

RUN = "version: 1\nname: x\nmodel: {preset: gpt-nano}\ndata: {preset: python-stdlib}\n"


def loaded(tmp_path: Path, *overrides: str) -> RunSettings:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return load_run(path, overrides)


def test_a_relative_place_is_beside_the_run_file(tmp_path: Path) -> None:
    assert loaded(tmp_path, "data={tokens: sub/../shards}").data.tokens == f"file://{tmp_path}/shards"
    (tmp_path / "tok").mkdir()
    data = loaded(tmp_path, "data={text: 'corpus/**/*.txt', tokenizer: tok, cache: 1 GiB, held_out: 0.1}").data
    assert (data.text, data.tokenizer) == (f"{tmp_path}/corpus/**/*.txt", f"{tmp_path}/tok")
    assert (data.cache_bytes, data.held_out) == (1 << 30, 0.1)
    assert loaded(tmp_path, "data={tokens: gs://bucket/tokens/}").data.tokens == "gs://bucket/tokens"
    hub, typo = ("maker/words@v2", "hf://words"), "wrods"
    for tokenizer, found in (*zip(hub, hub, strict=True), ("./none", f"{tmp_path}/none"), (typo, f"{tmp_path}/{typo}")):
        assert loaded(tmp_path, f"data={{text: a.txt, tokenizer: {tokenizer}}}").data.tokenizer == found, (
            "or of the Hub"
        )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data={tokens: a, text: b}", "give one of tokens and text"),
        ("data={preset: python-stdlib, tokens: a}", "give one of preset and tokens"),
        ("data.tokenizer=tok", "data.tokenizer: it has an effect on tokens and text alone"),
        ("data.cache=1 GB", "data.cache: it has an effect"),
        ("data.held_out=0.2", "data.held_out: it has an effect"),
        ("data={tokens: a, held_out: 1}", "data.held_out: must be above 0 and below 1"),
        ("data={tokens: a, cache: 1 MB}", "data.cache: must be at least"),
        ("data={tokens: a, cache: 4000000000}", "has no unit"),
        ("data={tokens: http://a}", "data.tokens: unknown store scheme"),
        ("data={text: gs://bucket/a.txt}", "data.text: must be a path on this machine"),
        ("data={tokens: a, args: {b: 1}}", "args belong to an entrypoint"),
        ("model={preset: vit-nano, vocabulary: 9}", "vocabulary belongs to a preset that reads text"),
        ("model.vocabulary=100", "model.vocabulary: 100 is too small: python-stdlib has 256 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loaded(tmp_path, override)


def test_images_are_not_trained_on_tokens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vit-nano reads images, not tokens"):
        loaded(tmp_path, "model.preset=vit-nano", "data={tokens: a}")
