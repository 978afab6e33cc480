"""Numbers of a whole run on a tiny corpus: build, score, predict, select, mix and the findings of the report.

A change of structure changes none of them. `pytest tests/golden --rewrite-snapshots` rewrites `numbers.json`; a commit
that does so says why. The keys of the file name quantities, not attributes of the package, so that a renamed attribute
changes this module and not the file.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
import pytest

import grasp
from grasp.api.predict import prediction_table
from grasp.artifact.reader import ArtifactReader
from grasp.predict.default_protocol import DEFAULT_PROTOCOL, resolve_protocol
from grasp.predict.families import parse_family
from grasp.predict.predictor import Predictor
from grasp.report.findings import LabelFindings, collect_findings
from tests.pipeline.world import SKETCHES, world
from tests.rounding import rounding

NUMBERS = Path(__file__).with_name("numbers.json")
KERNELS = {
    "new": ("output_layer", "embedding", "knn", "pooled"),
    "further": ("output_layer", "embedding", "gradient"),
}
# Additions and products one after the other behind a number: two blocks of 16 + 32 + 48 and a vocabulary of 300,
# forward and backward, then sums over 200 sampled positions, 48 positions of a row and 40 rows.
TERMS = 2 * (2 * (16 + 32 + 48) + 300) + 200 + 48 + 40
# Whitening divides by the root of eigenvalues that are damped to 1 % of their mean (`tau`): a relative error grows by
# as much as 1 / sqrt(tau) on each of the two sides of a relevance.
CONDITION = 2 / 0.01**0.5


def columns(table: pa.Table, identifier: str) -> dict[str, list[Any]]:
    """What identifies each line, and the columns of numbers in their order, whatever they are called."""
    values = [column.to_pylist() for column in table.columns if not pat.is_string(column.type)]
    return {"names": table[identifier].to_pylist(), "values": values}


def of_label(label: LabelFindings) -> dict[str, Any]:
    return {
        "values": list(label.slices.names),
        "rows": label.slices.rows_G.tolist(),
        "change_if_dropped": (-label.contribution.value_GT).T.tolist(),
        "interval_low": (-label.by_relevance.high_GT).T.tolist(),
        "interval_high": (-label.by_relevance.low_GT).T.tolist(),
    }


def predict_subsets(artifact: ArtifactReader) -> pa.Table:
    """Return the predictions for random halves of the rows."""
    predictor = Predictor.from_artifact(artifact, resolve_protocol(None, artifact, subsets=True))
    blocks = parse_family("uniform:0.5").draw(8, n_rows=artifact.n_rows, labels=None, seed=0, purpose="drawn")
    return prediction_table(predictor, artifact, blocks).read_all()


def of_artifact(art: grasp.Artifact, directory: Path) -> dict[str, Any]:
    """Return the numbers of every function; arrays are represented by their moments."""
    reader = art.files
    arrays = {
        name: np.concatenate([block for _, block in reader.array_blocks(name)]).astype(np.float64)
        for name in reader.array_names
    }
    selection = art.select("30%", by="topic", cap="60%")
    mixture = art.mix("topic")
    selection.save(directory / "selection.parquet")
    mixture.save(directory / "mixture.parquet")
    report = collect_findings(
        reader,
        DEFAULT_PROTOCOL,
        selection=directory / "selection.json",
        mixture=directory / "mixture.json",
    )
    return {
        "tokens": report.n_tokens,
        "arrays": {
            name: {"shape": list(value.shape), "mean": value.mean(), "root_mean_square": np.sqrt((value**2).mean())}
            for name, value in sorted(arrays.items())
        },
        "score": columns(art.score(top=10).table.select(["row_id", "effect"]), "row_id"),
        "predict_values": columns(art.predict(by="topic").table, "value"),
        "predict_kept": columns(art.predict(keep="topic = 'earth'").table, "target"),
        "predict_subsets": columns(predict_subsets(reader), "subset_id"),
        "select": {
            "row_ids": sorted(selection.row_ids),
            "tokens": selection.n_tokens,
            "value": selection.value,
            "change": selection.targets["change"].to_pylist(),
        },
        "mix": {"value": mixture.value, **columns(mixture.table, "value")},
        "report": {
            "labels": {label.slices.label: of_label(label) for label in report.labels},
            "row_effects": report.rows.effect_KT.T.tolist(),
        },
    }


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> dict[str, Any]:
    results = {}
    for train, kernels in KERNELS.items():
        directory = tmp_path_factory.mktemp(train)
        settings = world(directory, train=train, features={"kernels": (*kernels, *SKETCHES)})
        art = grasp.build(
            str(settings.model.path),
            settings.corpus.path,
            list(settings.targets.names),
            directory / "art",
            settings=settings.model_dump(mode="json"),
            untrained=True,
        )
        results[train] = of_artifact(art, directory)
    return shortened(results)


def shortened(value: Any) -> Any:
    """As JSON keeps it, with the digits that a float32 holds."""
    if isinstance(value, Mapping):
        return {key: shortened(held) for key, held in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [shortened(held) for held in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def differences(actual: Any, expected: Any, where: str = "") -> list[str]:
    """What differs: text and counts exactly, lists of numbers by the rounding of their largest."""
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or actual.keys() != expected.keys():
            return [f"{where}: {actual!r:.200} instead of the keys {list(expected)}"]
        return [line for key in expected for line in differences(actual[key], expected[key], f"{where}/{key}")]
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return [f"{where}: {actual!r:.200} instead of {len(expected)} values"]
        if not any(isinstance(value, float) for value in expected):
            pairs = zip(actual, expected, strict=True)
            return [line for k, pair in enumerate(pairs) for line in differences(*pair, f"{where}/{k}")]
    elif not isinstance(expected, float):
        return [] if actual == expected else [f"{where}: {actual!r} instead of {expected!r}"]
    actual_K, expected_K = (np.array(value, dtype=float, ndmin=1) for value in (actual, expected))  # null becomes nan
    tolerance = rounding(TERMS, np.nanmax(np.abs(expected_K))) * CONDITION
    if np.allclose(actual_K, expected_K, rtol=0, atol=tolerance, equal_nan=True):
        return []
    return [f"{where}: off by {np.nanmax(np.abs(actual_K - expected_K)):.2g}, tolerance {tolerance:.2g}: {actual}"]


def test_a_complete_run_gives_the_recorded_numbers(numbers, rewrite_snapshots):
    if rewrite_snapshots:
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    lines = differences(numbers, json.loads(NUMBERS.read_text(encoding="utf-8")))
    assert not lines, "\n".join(lines)


def test_a_changed_number_is_detected():
    expected = {"a": {"names": ["x"], "values": [[1.0, 2.0], [3, 4]]}, "b": 0.5, "c": None}
    assert differences(expected, expected) == []
    for path, value in [
        ("/a/names/0", {"a": {"names": ["y"], "values": [[1.0, 2.0], [3, 4]]}, "b": 0.5, "c": None}),
        ("/a/values/0", {"a": {"names": ["x"], "values": [[1.0, 2.02], [3, 4]]}, "b": 0.5, "c": None}),
        ("/a/values/1/1", {"a": {"names": ["x"], "values": [[1.0, 2.0], [3, 5]]}, "b": 0.5, "c": None}),
        ("/b", {"a": {"names": ["x"], "values": [[1.0, 2.0], [3, 4]]}, "b": 0.51, "c": None}),
        ("/c", {"a": {"names": ["x"], "values": [[1.0, 2.0], [3, 4]]}, "b": 0.5, "c": 1}),
        ("", {"a": {"names": ["x"], "values": [[1.0, 2.0], [3, 4]]}, "b": 0.5}),
    ]:
        (line,) = differences(value, expected)
        assert line.startswith(f"{path}: ")
