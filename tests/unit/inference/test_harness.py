"""What lm-evaluation-harness is told: log likelihoods by the logits, and texts that end where it wants."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco_cli.errors import UsageError
from diloco_cli.inference import harness
from diloco_cli.inference.generation import Causal
from diloco_cli.inference.harness import HarnessModel, evaluate_tasks
from diloco_cli.inference.vocabulary import Bytes
from tests.unit.inference.test_generation import OWN, pico

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'diloco[eval]'"
)


class Alphabet(nn.Module):
    """After a byte comes the next one, nearly for sure."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return 20.0 * torch.nn.functional.one_hot((tokens + 1) % 256, 256) * self.weight


def alphabet() -> HarnessModel:
    return HarnessModel(Causal(OWN, Alphabet()), Bytes())


def one_by_one(model: Causal, before: list[int], then: list[int]) -> tuple[float, bool]:
    """A token at a time, by the definition."""
    total, greedy = 0.0, True
    for n, token in enumerate(then):
        chances = model.logits([[*before, *then[:n]]])[0, -1].log_softmax(-1)
        total, greedy = total + float(chances[token]), greedy and int(chances.argmax()) == token
    return total, greedy


def test_log_likelihoods_are_those_of_the_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pico()
    pairs = [([1, 2, 3], [4, 5]), ([9], [8, 7, 6, 5]), ([1] * 20, [2]), ([3], [])]
    expected = [one_by_one(model, *pair) for pair in pairs]
    for most in (1, harness.MAX_LOGITS):
        monkeypatch.setattr(harness, "MAX_LOGITS", most)
        found = [score for pair in pairs[:3] for score in HarnessModel(model, Bytes()).scores([pair])]
        together = HarnessModel(model, Bytes()).scores(pairs[:3])
        for each in (found, together):
            assert [greedy for _, greedy in each] == [greedy for _, greedy in expected[:3]]
            assert [total for total, _ in each] == pytest.approx([total for total, _ in expected[:3]], abs=1e-4)
    assert HarnessModel(model, Bytes()).scores(pairs)[3] == (0.0, True)


def test_before_a_text_without_context_stands_a_line_break() -> None:
    model = pico()
    found = HarnessModel(model, Bytes())._loglikelihood_tokens([(None, [], [5, 6])])
    assert found[0][0] == pytest.approx(one_by_one(model, [ord("\n")], [5, 6])[0], abs=1e-4)


def test_what_is_longer_than_the_context_loses_its_oldest_tokens() -> None:
    """The context is 4: of six tokens the first is not seen, and the others are foretold from what is before them."""
    ((total, greedy),) = alphabet().scores([([1, 2, 3], [4, 5, 6])])
    assert greedy and total == pytest.approx(0.0, abs=1e-4)
    ((_, wrong),) = alphabet().scores([([1, 2, 3], [4, 5, 7])])
    assert not wrong
    ((total, greedy),) = alphabet().scores([([1], [9, 3, 4, 5, 6, 7])])  # 9 is beyond what can be seen
    assert greedy and total == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        ({"until": ["f"]}, "cde"),
        ({"until": "gh", "max_gen_toks": 9}, "cdef"),
        ({"max_gen_toks": 3}, "cde"),
        ({"until": ["é"], "max_gen_toks": 2, "do_sample": False, "temperature": 0.0}, "cd"),
    ],
)
def test_a_text_ends_where_the_task_wants_it(wishes: dict[str, Any], text: str) -> None:
    assert alphabet().generate_until([SimpleNamespace(args=("ab", wishes))]) == [text]


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match="lm-evaluation-harness") as caught:
        evaluate_tasks(pico(), Bytes(), ["x"], None, None)
    assert "eval" in (caught.value.hint or "")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Which letter comes next; how likely a text is; how it goes on. All from a file beside the tasks."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    lines = [{"text": "ab", "next": "c", "right": 0}, {"text": "kl", "next": "m", "right": 0}]
    lines.append({"text": "xy", "next": "z", "right": 1})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "metadata": {"version": 1},
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    choice: dict[str, Any] = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{right}}",
        "doc_to_choice": "{{[next, '!']}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", **mean}],
    }
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    }
    writing = {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{next}}",
        "generation_kwargs": {"max_gen_toks": 1, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    for name, what in (("choosing", choice), ("rolling", rolling), ("writing", writing)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **what}))
    return tmp_path


@needs_harness
def test_the_harness_judges_by_tasks_of_ones_own(tasks: Path) -> None:
    model = Causal(OWN, Alphabet())
    found = evaluate_tasks(model, Bytes(), ["choosing", "rolling", "writing"], tasks, None)
    assert found["choosing"]["acc"] == pytest.approx(2 / 3)  # of the third, the answer that counts as right is wrong
    assert found["writing"]["exact_match"] == 1.0
    texts = [b"ab", b"kl", b"xy"]
    total = sum(one_by_one(model, [ord("\n")], list(text))[0] for text in texts)
    assert found["rolling"]["byte_perplexity"] == pytest.approx(float(torch.tensor(-total / 6).exp()), rel=1e-3)
    assert evaluate_tasks(model, Bytes(), ["choosing"], tasks, 2)["choosing"]["acc"] == 1.0


@needs_harness
def test_a_task_that_is_not_known_or_lacks_its_data_is_an_error(tasks: Path) -> None:
    with pytest.raises(UsageError, match="no task 'chosing' is known; did you mean choosing"):
        evaluate_tasks(pico(), Bytes(), ["chosing"], tasks, None)
    (tasks / "data.jsonl").unlink()
    with pytest.raises(UsageError, match="cannot be evaluated"):
        evaluate_tasks(pico(), Bytes(), ["choosing"], tasks, None)
