"""A user's model or data that cannot train is refused where it is built, with the reason."""

from __future__ import annotations

import pytest
from torch import nn

from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.tasks.build import build_data, build_model

HERE = __name__


def no_parameters():
    return nn.Identity()


def frozen():
    return nn.Linear(1, 1).requires_grad_(False)


def no_data():
    return object()


def run_of(model: str = "frozen", data: str = "no_data") -> RunSettings:
    return RunSettings(
        name="x", model=ModelSettings(entrypoint=f"{HERE}:{model}"), data=DataSettings(entrypoint=f"{HERE}:{data}")
    )


@pytest.mark.parametrize("function", ["no_parameters", "frozen"])
def test_a_model_without_parameters_is_refused_where_it_is_built(function):
    with pytest.raises(UsageError, match=f"{function} returned a model without parameters to train"):
        build_model(run_of(model=function))


def test_data_without_the_two_methods_are_refused_where_they_are_built():
    with pytest.raises(UsageError, match="returned a object without batch and held_out"):
        build_data(run_of(data="no_data"))


def test_a_files_name_in_place_of_a_modules_is_told():
    run = RunSettings(name="x", model=ModelSettings(entrypoint="model.py:build"))
    with pytest.raises(UsageError) as caught:
        build_model(run)
    assert caught.value.hint == "a module's name, without .py: model:build"


def test_data_that_are_only_evaluated_need_no_batches():
    with pytest.raises(UsageError, match="returned a object without held_out"):
        build_data(run_of(data="no_data"), uses=("held_out",))
