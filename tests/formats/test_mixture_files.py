"""Mixtures in configuration files of tools: the parser of each tool reads the weights, and they can be imported."""

import importlib.util
import json
import shlex

import numpy as np
import pyarrow as pa
import pytest
import yaml

import grasp
from grasp.errors import RunsError
from grasp.file_readers import claimed, readers
from grasp.mixtures import MixtureWeights, read_mixture, write_mixture

FORMATS = readers("mixture")
VALUES = ("web", "Games & Fun", "code", "gone", 'a "quoted" #one', "Games, Fun")
WEIGHTS = MixtureWeights(
    "topic",
    VALUES,
    {
        "rows": np.array([100, 50, 30, 20, 10, 5]),
        "tokens": np.array([10_000, 2_000, 900, 700, 300, 50]),
        "documents": np.array([40, 30, 20, 10, 5, 5]),
    },
    np.array([0.5, 1.4, 2.0, 0.0, 3.333, 1.0]),
)


@pytest.fixture(params=list(FORMATS))
def form(request):
    return request.param


def written(path, form, weights=WEIGHTS, name="mixture"):
    path.mkdir(exist_ok=True)
    write_mixture(weights, path / f"{name}{FORMATS[form].suffixes[0]}", form)
    return path / f"{name}{FORMATS[form].suffixes[0]}"


def test_written_mixtures_are_read_back(tmp_path, form):
    path = written(tmp_path, form)
    mixture = read_mixture(path)
    assert claimed("mixture", path).name == form
    want_G = WEIGHTS.times_G if mixture.measure == "times" else WEIGHTS.shares(mixture.measure)
    names = WEIGHTS.names() if form == "megatron" else VALUES  # whose file has no comments
    want = {name: weight for name, weight in zip(names, want_G, strict=True) if weight > 0}
    close = 0.5 / 100 if form == "axolotl" else 1e-7  # whole percents
    assert {name for name, weight in mixture.weight_of.items() if weight} == set(want)
    np.testing.assert_allclose([mixture.weight_of[name] for name in want], list(want.values()), atol=close)


def test_olmo_core_loads_its_file(tmp_path):
    sources = yaml.safe_load(written(tmp_path, "olmo-core").read_text())["sources"]
    fields = {"source_name", "target_ratio", "paths", "max_repetition_ratio"}
    assert all(set(entry) == fields and entry["paths"] and entry["max_repetition_ratio"] >= 1 for entry in sources)
    np.testing.assert_allclose(sum(entry["target_ratio"] for entry in sources), 1.0, atol=1e-7)
    tokens_G = WEIGHTS.size_G["tokens"]
    available = dict(zip(WEIGHTS.names(), tokens_G / tokens_G.sum(), strict=True))
    for entry in sources:  # which OLMo-core checks when it counts the tokens
        assert entry["target_ratio"] <= entry["max_repetition_ratio"] * available[entry["source_name"]] + 1e-7
    source_mixture = pytest.importorskip("olmo_core.data.source_mixture")
    for entry in source_mixture.SourceMixtureList.from_dict({"sources": sources}).sources:
        entry.validate()


def test_megatron_reads_weights_and_prefixes_in_turn(tmp_path):
    blend = written(tmp_path, "megatron").read_text().split()  # as training/arguments.py reads --data-args-path
    assert len(blend) % 2 == 0  # or get_blend_from_list takes all of them for prefixes
    weights, prefixes = np.array(blend[::2], dtype=np.float64), blend[1::2]
    np.testing.assert_allclose(weights.sum(), 1.0, atol=1e-7)
    assert len(set(prefixes)) == len(prefixes) == 5
    assert shlex.split(" ".join(prefixes)) == prefixes


def test_llama_factory_splits_names_and_probabilities_at_commas(tmp_path):
    data = yaml.safe_load(written(tmp_path, "llama-factory").read_text())
    assert set(data) == {"dataset", "mix_strategy", "interleave_probs"}
    names, probabilities = data["dataset"].split(","), [float(entry) for entry in data["interleave_probs"].split(",")]
    assert data["mix_strategy"] in ("interleave_under", "interleave_over")  # concat takes no probabilities
    assert len(names) == len(probabilities) == len(set(names)) == 5
    np.testing.assert_allclose(sum(probabilities), 1.0, atol=1e-7)


def test_axolotl_entries_are_splits_that_datasets_cuts(tmp_path):
    read_instruction = pytest.importorskip("datasets").ReadInstruction
    data = yaml.safe_load(written(tmp_path, "axolotl").read_text())
    rows = dict.fromkeys(WEIGHTS.names(), 0)
    for entry in data["datasets"]:
        assert set(entry) == {"path", "ds_type", "type", "split"}  # of axolotl's SFTDataset
        name = entry["path"].removeprefix("data/").removesuffix(".jsonl")
        (part,) = read_instruction.from_spec(entry["split"]).to_absolute({"train": 1_000})
        rows[name] += (part.to if part.to is not None else 1_000) - (part.from_ or 0)
    np.testing.assert_allclose(np.array(list(rows.values())) / 1_000, WEIGHTS.times_G, atol=0.005)


def test_nemo_automodel_accepts_its_domains(tmp_path):
    data = yaml.safe_load(written(tmp_path, "nemo-automodel").read_text())
    domains, paths = data["domain_mixture"]["domains"], data["dataset"]["paths"]
    blend = list(zip(map(float, paths[::2]), paths[1::2], strict=True))  # as get_blend_from_list reads it
    assert blend == [(entry["sampling_weight"], entry["path"]) for entry in domains]  # or it is refused
    assert all(entry["objective_weight"] == entry["sampling_weight"] > 0 for entry in domains)
    mixture = pytest.importorskip("nemo_automodel.components.training.domain_mixture")
    config = mixture.DomainMixtureConfig(tuple(mixture.DomainWeightConfig(**entry) for entry in domains))
    assert config.build(blend=([path for _, path in blend], [share for share, _ in blend])).loss_multipliers == (1,) * 5


def test_torchtitan_gets_sources_and_weights(tmp_path):
    names: dict = {}
    exec(written(tmp_path, "torchtitan").read_text(), names)
    sources = list(names["WEIGHTS"].values())
    assert [name for name, _ in sources] == [name for name in WEIGHTS.names() if name != "gone"]
    np.testing.assert_allclose(sum(weight for _, weight in sources), 1.0, atol=1e-7)
    loaders = pytest.importorskip("torchtitan.hf_datasets.text_datasets")
    config = loaders.InterleavedHuggingFaceTextDataLoader.Config
    assert config(sources=[loaders.HFDataSource(dataset=name, weight=weight) for name, weight in sources])


def test_datatrove_reads_each_document_as_often_as_its_weight(tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    pytest.importorskip("orjson")  # of its JSONL reader
    path = written(tmp_path, "datatrove")
    monkeypatch.chdir(tmp_path)
    for name in WEIGHTS.names():
        (tmp_path / "data" / name).mkdir(parents=True)
        lines = [json.dumps({"text": f"{name} {d}", "id": f"{name}-{d}"}) for d in range(2_000)]
        (tmp_path / "data" / name / "0.jsonl").write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location("mixture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = dict.fromkeys(WEIGHTS.names(), 0)
    for reader, sampler in module.pipelines():
        for document in sampler.run(reader.run(None, 0, 1), 0, 1):
            seen[document.text.rpartition(" ")[0]] += 1
    times_G = WEIGHTS.times_G
    error_G = 4 * np.sqrt(0.25 / 2_000)  # of a part drawn at random
    np.testing.assert_allclose(np.array(list(seen.values())) / 2_000, times_G, atol=error_G)


RUNS = pa.table({"run": ["a", "b"], "sciq/loss": [3.0, 2.9]})


def test_imported_weights_are_those_of_the_file_to_the_last_digit(tmp_path, form):
    other = MixtureWeights("topic", VALUES, WEIGHTS.size_G, np.array([1.5, 0.21, 1.0, 0.5, 0.07, 2.0]))
    place = tmp_path / "mixtures"
    paths = [written(place, form, weights, name) for name, weights in (("a", WEIGHTS), ("b", other))]
    runs = grasp.import_runs(place, RUNS, label="topic")
    assert runs.info.kind == ("times" if form in ("axolotl", "datatrove") else "shares")
    assert "weights of the mixtures are" in str(runs)
    for run, weight_G, path in zip(runs.runs, runs.weights_RG(), paths, strict=True):
        in_file = read_mixture(path)
        assert path.stem == run
        assert {name: weight for name, weight in zip(runs.values, weight_G, strict=True) if weight} == {
            name: weight for name, weight in in_file.weight_of.items() if weight
        }
        if in_file.measure != "times":
            assert runs.info.measure == in_file.measure == {"llama-factory": "documents"}.get(form, "tokens")
            assert sum(round(weight * 1e8) for weight in in_file.weight_of.values()) == 10**8
    with pytest.raises(RunsError, match="pass the label"):
        grasp.import_runs(place, RUNS)
    with pytest.raises(RunsError, match="pass the results"):
        grasp.import_runs(place, label="topic")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.yaml", "sources: [{source_name: a}]\n", "not a mixture although it has the field sources: 'target_ratio'"),
        ("m.yaml", "other: 1\n", r"not a mixture in a known format \(axolotl, csv,"),
        ("m.yaml", "datasets: [{path: a.jsonl, split: 'train[40%:]'}]\n", r"split 'train\[40%:\]', expected e.g."),
        ("m.yaml", "dataset: a,b\ninterleave_probs: '1.0'\n", "not a mixture"),
        ("m.txt", "0.5 a 0.5\n", "has 3 words, expected alternating"),
        ("m.txt", "nan a\n", r"got weights \[nan\], expected nonnegative"),
        ("m.py", "MIXTURE = [\n", "not a mixture"),
        ("m.py", "X = 1\n", "not a mixture in a known format"),
        ("m.py", "WEIGHTS = {'web': 0.5}\n", "not a mixture although it assigns WEIGHTS"),
        ("m.yaml", "domain_mixture: {domains: [{name: a}]}\n", "'sampling_weight'"),
        (
            "m.py",
            "MIXTURE = {'web': ('data', __import__('sys').exit(1))}\n",
            "not a mixture although it assigns MIXTURE",
        ),
        ("m.csv", "value,now\na,1\n", "'share_of_tokens'"),
    ],
)
def test_files_without_a_mixture_are_refused_in_one_line_and_never_run(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(RunsError, match=message) as error:
        read_mixture(tmp_path / name)
    assert "\n" not in str(error.value)
