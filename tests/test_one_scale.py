"""All interfaces give the same answer: flags, tables, Python, the coefficients of the report, single rows."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.api.predict import predict
from grasp.api.score import score
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.inspect.explain import explain
from grasp.predict.default_protocol import TASK_PROTOCOL, resolve_protocol
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import save_protocol
from grasp.predict.slices import label_slices
from grasp.report.findings import collect_findings
from grasp.select.select import select
from grasp.serving.serve import QueryService, respond
from grasp.text import as_names
from tests.cli.grasp_command import succeed
from tests.rules import rule
from tests.runs.environments import write_artifact, write_environment

GEOMETRY = rule(
    name="geometry",
    match={"output_layer": 1.0, "pooled": 0.5},
    components={"joint.pair": -0.25, "hidden.cent": 0.2, "residual.self": -0.1},
)


@pytest.mark.parametrize("protocol", [TASK_PROTOCOL, GEOMETRY], ids=["default", "geometry"])
def test_dropping_a_slice_has_one_value_in_all_interfaces(art, tmp_path, protocol):
    artifact = ArtifactReader.open(art)
    save_protocol(protocol, tmp_path / "p.yaml")
    rows = pq.read_table(art / "rows.parquet")
    retained_N = np.array(rows["topic"].to_pylist()) != "life"
    kept_ids = rows["row_id"].filter(pa.array(retained_N)).to_pylist()
    pq.write_table(pa.table({"subset_id": ["s"] * len(kept_ids), "row_id": kept_ids}), tmp_path / "kept.parquet")

    def by_command(*flags) -> float:
        out = tmp_path / "out.parquet"
        succeed("predict", art, *flags, "--protocol", tmp_path / "p.yaml", "--out", out)
        return pq.read_table(out)["change"].to_pylist()[0]

    def in_python(**question) -> float:
        return predict(artifact, protocol=protocol, **question).to_pandas()["change"][0]

    answers = {
        "--drop": by_command("--drop", "topic = 'life'"),
        "--keep": by_command("--keep", "topic != 'life'"),
        "--weight": by_command("--weight", "topic = 'life': 0"),
        "--subsets": by_command("--subsets", tmp_path / "kept.parquet"),
        "drop": in_python(drop="topic = 'life'"),
        "weight": in_python(weight={"topic = 'life'": 0.0}),
        "weight as text": in_python(weight="topic = 'life': 0"),
        "weight as a list": in_python(weight=["topic = 'life': 0"]),
        "row ids": in_python(subsets={"kept": kept_ids}),
        "DataFrame": in_python(subsets=pq.read_table(tmp_path / "kept.parquet").to_pandas()),
    }
    by = predict(artifact, by="topic", protocol=protocol).to_pandas().set_index("value")
    answers["by"] = by["if_dropped"]["life"]
    answers |= from_coefficients(artifact, protocol)
    if protocol.is_additive:
        answers |= {f"served {name}": value for name, value in served(artifact).items()}
        ranked = score(artifact, "facts", protocol=protocol).to_pandas().set_index("row_id")["effect"]
        answers["mean of score"] = ranked[kept_ids].mean()
        share = (~retained_N).mean()
        answers["share and mean effect"] = -share / (1 - share) * by["effect"]["life"]
    reference = answers["--drop"]
    assert abs(reference) > 0.01
    assert answers == pytest.approx(dict.fromkeys(answers, reference), abs=2e-6)


def served(artifact) -> dict[str, float]:
    """Return the answers of the server, from plain arguments to JSON."""
    ask = QueryService(artifact)
    questions = {"drop": "topic = 'life'", "keep": "topic != 'life'", "weight": ["topic = 'life': 0"], "by": "topic"}
    changes = {}
    for name, value in questions.items():
        answer, status = respond(ask, "predict", {name: value})
        assert status == 200, answer
        lines = [dict(zip(answer["columns"], line, strict=True)) for line in answer["rows"]]
        changes[name] = (
            lines[0]["change"] if name != "by" else {line["value"]: line for line in lines}["life"]["if_dropped"]
        )
    return changes


def from_coefficients(artifact, protocol) -> dict[str, float]:
    """Compute the change by the formula of the report."""
    slices = label_slices(LabelTable(artifact.rows_path).column("topic"), row_tokens(artifact))
    predictor = Predictor.from_artifact(artifact, protocol)
    sums = predictor.sums(slices.each)
    f_G = np.array([float(name != "life") for name in slices.names])
    changes = {"shares of slices": predictor.change(slices.weights(f_G[None]))[0, 0]}
    if not protocol.is_additive:  # interactions between rows are not a sum over slices
        return changes
    return changes | {"coefficients": f_G @ sums.effect_BT[:, 0] / (f_G @ sums.n_retained_B)}


def test_the_effect_of_a_row_is_the_same_everywhere(art):
    artifact = ArtifactReader.open(art)
    effect_N = score(artifact, "facts").to_pandas().set_index("row_id")["effect"]
    answer, _ = respond(QueryService(artifact), "score", {"top": len(effect_N)})
    lines = [dict(zip(answer["columns"], line, strict=True)) for line in answer["rows"]]
    shown = {line["row_id"]: line["effect"] for line in lines}
    for row in [lines[k]["row_id"] for k in (0, len(lines) // 2, -1)]:
        explained = explain(artifact, "facts", row)
        without = predict(artifact, drop=f"row_id = '{row}'").to_pandas()["change"][0]
        effects = {
            "explain": explained.effect,
            "served score": shown[row],
            "what leaving it out costs": -(len(effect_N) - 1) * without,
        }
        assert effects == pytest.approx(dict.fromkeys(effects, effect_N[row]), abs=1e-4)
        # words are of the model run again, in full precision; what the artifact holds is rounded to float16
        words = np.nansum(explained.table["contribution"].to_numpy()) + explained.text + explained.average
        assert words == pytest.approx(effect_N[row], rel=1e-2, abs=1e-2)


def test_predictions_with_runs_have_one_value_in_all_interfaces(tmp_path):
    """Ask with and without the other target, by every flag and function, and in the report."""
    artifact = write_artifact(tmp_path / "art")

    def utility(b, seed, target):
        return 0.1 * np.sin(b) + 0.03 * np.cos(3 * b + len(target)) + 0.004 * np.sin(7 * b + seed)

    runs = write_environment(tmp_path / "env", artifact, utility)
    labels = LabelTable(artifact.rows_path)
    kept_ids = [f"row-{i}" for i in np.flatnonzero(~labels.matching("topic = 'games'").mask_N)]
    question = {"drop": "topic = 'games'"}, {"weight": {"topic = 'games'": 0.0}}, {"subsets": {"kept": kept_ids}}
    columns = ["nats", "nats_low", "nats_high"]
    answers = {}
    for target in ("sciq", ["sciq", "boolq"], ["boolq", "sciq"], None):
        for arguments in question:
            table = predict(artifact, **arguments, target=target, runs=runs).to_pandas().set_index("target")
            answers[f"{target} {next(iter(arguments))}"] = table.loc["sciq", columns].tolist()
        by = predict(artifact, by="topic", target=target, runs=runs).to_pandas().set_index(["target", "value"])
        answers[f"{target} by"] = by.loc[("sciq", "games"), columns].tolist()
        shown = None if target is None else as_names(target)
        findings = collect_findings(artifact, resolve_protocol(None, artifact), target=shown, runs=runs)
        g, t = findings.labels[0].slices.names.index("games"), list(findings.targets).index("sciq")
        part = findings.labels[0].contribution  # with the opposite sign
        answers[f"{target} page"] = [-array[g, t] for array in (part.value_GT, part.high_GT, part.low_GT)]
    served = QueryService(artifact, runs=runs)
    answer, status = respond(served, "predict", {"drop": "topic = 'games'", "target": "sciq"})
    assert status == 200, answer
    answers["served"] = [dict(zip(answer["columns"], answer["rows"][0], strict=True))[name] for name in columns]
    selection = select(artifact, len(kept_ids), "sciq", runs=runs)
    chosen = predict(artifact, subsets={"chosen": selection.row_ids}, runs=runs).to_pandas().set_index("target")
    reference = answers["sciq drop"]
    assert reference[1] < reference[0] < reference[2]
    for name, value in answers.items():
        assert value == pytest.approx(reference, abs=1e-9), name
    promised = [selection.targets[name][0].as_py() for name in columns]
    assert promised == pytest.approx(chosen.loc["sciq", columns].tolist(), abs=1e-9)
