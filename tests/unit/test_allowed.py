"""Tests of faults in a run file: each error names setting, value and allowed values, without words of the validation
library."""

import json
import re
import tomllib
from contextlib import suppress
from typing import Any

import pytest

from dilocox.cli.run.init import render_preset
from dilocox.protocol.run.allowed_values import allowed, annotated, section_of
from dilocox.protocol.run.manifest import Manifest, RunFileError
from tests.helpers import manifest_keys

TEXT = render_preset("tiny", "a-run", "00" * 32)
LIBRARY = re.compile(
    r"Input should|String should|Field required|valid |pydantic|union|literal|tuple|type=|\bdict\b|\bint\b|\bNone\b"
)


KEYS = list(manifest_keys())


def toml(table: dict[str, Any], path: str = "") -> str:
    plain = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict))
    tables = "".join(toml(value, f"{path}{key}.") for key, value in table.items() if isinstance(value, dict))
    return (f"[{path[:-1]}]\n" if path else "") + plain + tables


def faults(document: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        Manifest.from_toml(toml(document))
    except RunFileError as error:
        return list(error.faults)
    return []


def with_value(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    document = tomllib.loads(TEXT)
    at = document
    for part in path[:-1]:
        at = at.setdefault(part, {})
    at[path[-1]] = value
    return document


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_every_wrong_value_is_named_with_what_is_allowed(path: tuple[str, ...]):
    for value in ("{digest}", -1.5, 1e300, [["x"]], {"a": {"b": 1}}, True, "x" * 10_000):
        found = faults(with_value(path, value))
        for name, why in found:
            assert not LIBRARY.search(why), (name, why)
            assert len(why) < 500
        wrong = [why for name, why in found if name == ".".join(path) and "not allowed" in why]
        with suppress(StopIteration):
            why = next(iter(wrong))
            assert why.startswith(json.dumps(value)[:20])
            assert "; allowed: " in why


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_every_key_says_what_it_may_be(path: tuple[str, ...]):
    section: Any = Manifest
    for part in path:
        annotation = annotated(section.model_fields[part])
        section = section_of(annotation)
    assert allowed(annotation), "a pattern without words raises"


def test_a_missing_key_says_so():
    document = with_value(("model", "config", "num_hidden_layers"), 4)
    del document["model"]["config"]["num_hidden_layers"]
    [(path, why)] = faults(document)
    assert path == "model.config.num_hidden_layers"
    assert why.startswith("is missing; allowed: a whole number at least 1")


@pytest.mark.parametrize("path", [("run", "owner"), ("data", "digest"), ("run", "name")])
def test_an_unfilled_placeholder_is_named(path: tuple[str, ...]):
    [(name, why)] = faults(with_value(path, "{owner}"))
    assert name == ".".join(path)
    assert '"{owner}"' in why
    assert "dilocox init" in why


def test_a_union_is_one_fault_with_all_that_is_allowed():
    [(name, why)] = faults(with_value(("rounds", "weight_cap"), -3))
    assert name == "rounds.weight_cap"
    assert " or " in why


def test_all_that_does_not_fit_together_is_told_at_once():
    document = with_value(("rounds", "max_inner_steps"), 1)
    document["rounds"]["start_clusters"] = 1
    document["compression"] = {"codec": "topk-int2", "adapt": "effective-rank"}
    assert sorted(path for path, _ in faults(document)) == ["compression"] * 2 + ["rounds"] * 2
