"""What a machine consents to: nothing that a format names, unless it was named here."""

from __future__ import annotations

import pytest

from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings
from diloco_cli.digests import digest
from diloco_cli.protocol.rules.consent import Allowance, Code, FormatNames, code_of, decide, to_remember

DIGEST = digest(b"format")
MODEL = Code("model.entrypoint", "pkg.own:model", {"width": 32})
DATA = Code("data.entrypoint", "pkg.data:data", {"path": "/shards"})
BOTH = FormatNames(DIGEST, (MODEL, DATA))
FAR = FormatNames(DIGEST, (), ("gs://far/runs/nano",))


def test_a_format_that_names_neither_code_nor_another_store_needs_no_consent() -> None:
    assert decide(FormatNames(DIGEST), Allowance()).allowed


@pytest.mark.parametrize(
    ("named", "allowance"),
    [
        (BOTH, Allowance((DIGEST,))),
        (FAR, Allowance((DIGEST,))),
        (BOTH, Allowance(("pkg.own", "pkg.data"))),
        (BOTH, Allowance(("pkg.own:model", "pkg.data"))),
        (BOTH, Allowance((), (DATA, MODEL))),
        (FAR, Allowance((), (), ("gs://far",))),
        (FAR, Allowance((), (), ("gs://far/runs/nano",))),
    ],
)
def test_each_way_to_consent_is_enough(named: FormatNames, allowance: Allowance) -> None:
    assert decide(named, allowance).allowed


@pytest.mark.parametrize(
    ("allowance", "refused"),
    [
        (Allowance(), (MODEL, DATA)),
        (Allowance(("pkg.own",)), (DATA,)),
        (Allowance(("pkg", "pkg.own:mod", "own:model", "model")), (MODEL, DATA)),
        (Allowance((digest(b"another format"),)), (MODEL, DATA)),
        (Allowance((), (MODEL, Code("data.entrypoint", "pkg.data:data", {"path": "/etc"}))), (DATA,)),
        (Allowance((), (MODEL, Code("model.entrypoint", "pkg.data:data", {"path": "/shards"}))), (DATA,)),
        (Allowance((), (), ("gs://far",)), (MODEL, DATA)),
    ],
)
def test_what_was_not_named_is_refused_by_name(allowance: Allowance, refused: tuple[Code, ...]) -> None:
    decision = decide(BOTH, allowance)
    assert not decision.allowed and decision.code == refused
    assert all(code.name in decision.reason for code in refused)


@pytest.mark.parametrize("store", ["gs://fa", "s3://far/runs", "gs://far/runs/na", "file:///far"])
def test_a_store_that_only_looks_alike_is_another(store: str) -> None:
    decision = decide(FAR, Allowance((), (), (store,)))
    assert not decision.allowed and decision.stores == FAR.stores and "gs://far/runs/nano" in decision.reason


def test_a_refusal_shows_the_arguments_and_no_more_than_a_line_of_them() -> None:
    code = Code("model.entrypoint", "os:system", {"command": "touch /tmp/x" + "y" * 1000})
    reason = decide(FormatNames(DIGEST, (code,)), Allowance()).reason
    assert "os:system(command='touch /tmp/x" in reason and len(reason) < 400


def test_only_what_the_format_names_is_remembered() -> None:
    more = Allowance(("pkg.own", "another"), (DATA,), ("gs://elsewhere",))
    assert to_remember(BOTH, more) == Allowance(("pkg.own:model", "pkg.data:data"))
    assert to_remember(FAR, more) == Allowance()
    assert to_remember(FAR, Allowance((DIGEST,), (), ("gs://far",))) == Allowance((DIGEST,), (), FAR.stores)


@pytest.mark.parametrize(
    ("model", "data", "names"),
    [
        (ModelSettings(preset="gpt-nano"), DataSettings(preset="python-stdlib"), []),
        (ModelSettings(huggingface="tiny", args={"model_type": "gpt2"}), DataSettings(preset="python-stdlib"), []),
        (ModelSettings(huggingface="/etc"), DataSettings(preset="python-stdlib"), ["/etc"]),
        (ModelSettings(preset="gpt-nano"), DataSettings(entrypoint="a:b"), ["a:b"]),
        (
            ModelSettings(entrypoint="os:system", huggingface="x"),
            DataSettings(entrypoint="a:b"),
            ["os:system", "x", "a:b"],
        ),
    ],
)
def test_code_is_what_a_machine_would_import_or_look_for(
    model: ModelSettings, data: DataSettings, names: list[str]
) -> None:
    assert [code.name for code in code_of(RunSettings("x", model=model, data=data))] == names
