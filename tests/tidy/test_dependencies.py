"""What `pip install` brings is what the package imports, in versions that were tried."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import distribution, packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tidy.test_layers import MODULES, ROOT, imports_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
OF_USERS = [*PROJECT["project"]["dependencies"], *(line for name in EXTRAS if name != "dev" for line in EXTRAS[name])]
ALL = [Requirement(line) for line in (*PROJECT["build-system"]["requires"], *OF_USERS, *EXTRAS["dev"])]
BOUNDED = {canonicalize_name(each.name): each for each in ALL if each.name != PROJECT["project"]["name"]}
OWNERS = packages_distributions()


def is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "diloco_cli"}


def owners_of(module: str) -> set[str]:
    """The distributions that hold this module. Several share `google`: there the module's own file tells. What is not
    installed here is taken for a distribution of the same name."""
    top = module.partition(".")[0]
    owners = set(OWNERS.get(top, [top]))
    if len(owners) > 1:
        path = module.replace(".", "/")
        files = {f"{path}.py", f"{path}/__init__.py"}
        owners = {name for name in owners if files & {str(file) for file in distribution(name).files or ()}}
    return {canonicalize_name(name) for name in owners}


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / "tests" / name).read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def test_every_import_of_the_package_is_a_declared_dependency() -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in OF_USERS}
    undeclared = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in MODULES
        for module, line in imports_of(path)
        if is_foreign(module) and not owners_of(module) & declared
    ]
    assert undeclared == []


@pytest.mark.parametrize(
    ("module", "owner"),
    [("google.auth.exceptions", "google-auth"), ("google_crc32c", "google-crc32c"), ("yaml.nodes", "pyyaml")],
)
def test_a_module_is_traced_to_what_brings_it(module: str, owner: str) -> None:
    assert owners_of(module) == {owner}


def test_the_oldest_versions_that_are_tried_are_the_lower_bounds() -> None:
    bounds = {}
    for name, requirement in BOUNDED.items():
        (bound,) = requirement.specifier
        assert bound.operator == ">=", f"{requirement}: a lower bound and nothing else"
        bounds[name] = Version(bound.version)
    assert pins("constraints-oldest.txt") == bounds


def test_readmes_versions_are_allowed() -> None:
    chosen = pins("constraints.txt")
    refused = [f"{n}=={chosen[n]}" for n in BOUNDED.keys() & chosen if chosen[n] not in BOUNDED[n].specifier]
    assert refused == []
    assert BOUNDED.keys() - chosen == {
        "hatchling",
        "tokenizers",
        "transformers",
    }  # the build's, and an extra of no command
