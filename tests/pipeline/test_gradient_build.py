"""The gradient kernel in whole builds: trained and frozen parameters, limited memory, and refusals."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ModelError, SettingsError
from grasp.kernels import coordinates as coordinates_module
from grasp.kernels.coordinates import SampledGradients
from grasp.kernels.gradient import CURVATURE_ROWS, Curvature, Gradient
from grasp.kernels.kernel import CorpusMoments
from grasp.models.build_source import BuildSource
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example
from grasp.models.tokenizer import HfTokenizer
from grasp.pipeline.model_pass import unit_gradients
from grasp.pipeline.pipeline import build_artifact
from grasp.progress import ignore
from grasp.seeds import stream
from grasp.settings import FeatureSettings
from grasp.training.fine_tuning_recipe import default_recipe
from tests.baselines.gradient_world import reference
from tests.mentions import assert_mentions
from tests.pipeline.test_pipeline import Notes
from tests.pipeline.world import changed, relevance, world

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


WHOLE = {"sample_positions": 10**6}  # the sample is the corpus


@pytest.fixture(scope="module")
def built(root):
    return build_artifact(world(root, train="further", features=WHOLE), root / "built")


def test_stored_relevance_fits_float16(built):
    stored = np.abs(np.load(built / "arrays" / "relevance_gradient" / "00000.npy"))
    assert 2**-8 < np.median(stored) < 2**8  # rows of a few tokens, of a model that any step moves


def test_of_an_adapter_all_coordinates_of_its_own_matrices_are_used(root, tmp_path):
    peft = pytest.importorskip("peft")
    settings = world(root, train="further", features=WHOLE)
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(settings.model.path)
    how = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, how)
    adapted.save_pretrained(tmp_path / "adapter")
    adapter_settings, notes = changed(settings, model={"path": str(tmp_path / "adapter")}), Notes()
    artifact = ArtifactReader.open(build_artifact(adapter_settings, tmp_path / "art", progress=notes))
    size = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert_mentions(notes.lines, f"gradients of {size:,} ", f" {size:,} parameters", " 8 layers", "frozen")
    assert artifact.manifest.settings["model"]["adapter"] == "apart"


def test_an_adapter_is_merged_into_the_model_if_a_new_model_is_trained(root, tmp_path):
    peft = pytest.importorskip("peft")
    settings = world(root, train="new")
    base = AutoModelForCausalLM.from_pretrained(settings.model.path)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    out = build_artifact(changed(settings, model={"path": str(tmp_path / "adapter")}), tmp_path / "art")
    assert ArtifactReader.open(out).manifest.settings["model"]["adapter"] == "folded"


def test_frozen_parameters_are_excluded_unless_all_are_frozen(root):
    settings = world(root)
    model = AutoModelForCausalLM.from_pretrained(settings.model.path)
    model.model.layers[0].requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    read = ReferenceModel(model, HfTokenizer(tokenizer, vocab_size=300))
    reader = SampledGradients.choose(read, FeatureSettings())
    names = {block.name[: len("model.layers.0.")] for block in reader.engine.layers.blocks}
    assert "model.layers.0." not in names
    assert "model.layers.1." in names
    assert "frozen" in reader.describe()
    frozen = reference("llama", torch.float32)  # a reference model freezes what it reads
    assert SampledGradients.choose(ReferenceModel(frozen.model, None), FeatureSettings()).skipped_layers == ()


def test_layers_without_per_row_gradients_are_excluded_and_named():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(**sizes, **heads, bos_token_id=None, eos_token_id=0)
    reader = SampledGradients.choose(ReferenceModel(MixtralForCausalLM(config), None), FeatureSettings())
    assert any("self_attn" in block.name for block in reader.engine.layers.blocks)
    assert len(reader.skipped_layers) > 0
    assert all(".mlp." in name for name in reader.skipped_layers)
    assert_mentions(reader.describe(), "model.layers.0.mlp.", "6 in total")


def test_models_without_the_gradients_that_are_asked_for_are_refused():
    with pytest.raises(SettingsError, match=r"gradient_coordinates: .*\b10,000,000\b"):
        SampledGradients.choose(reference("llama"), FeatureSettings(gradient_coordinates=10_000_000))
    with pytest.raises(ModelError, match=r"kernels: .*gradient.*causal LM"):  # a classifier
        SampledGradients.choose(SimpleNamespace(), FeatureSettings())
    assert SampledGradients.choose(reference("llama"), FeatureSettings(gradient_coordinates="all")).sample.size > 0


def test_units_that_do_not_fit_in_memory_are_kept_in_a_file_with_the_same_results(root, built, tmp_path, monkeypatch):
    settings = world(root, train="further", features={"gradient_coordinates": 3_000})
    settings = changed(settings, corpus={"limit": 8})
    inside = relevance(build_artifact(settings, tmp_path / "inside"))
    monkeypatch.setattr(coordinates_module, "MAX_MEMORY_BYTES", 4_096)
    assert np.array_equal(relevance(build_artifact(settings, tmp_path / "outside")), inside)
    monkeypatch.setattr(coordinates_module.shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    with pytest.raises(SettingsError, match=r"6 units.* 0\.0 GiB"):
        build_artifact(settings, tmp_path / "nowhere")


def test_a_build_has_the_curvature_of_its_rows_and_of_the_training(built):
    artifact = ArtifactReader.open(built)
    source = BuildSource(artifact)
    store, settings = source.rows, source.settings.features
    shard = store.rows(np.arange(store.n_rows))
    examples = [Example(shard.ids(i)) for i in range(len(shard))]
    measured = stream(settings.seed, "curvature").permutation(store.n_rows)[:CURVATURE_ROWS]
    units = [Example(unit_token.input_ids, unit_token.first) for unit_token in source.unit_tokens]
    gradients = SampledGradients.choose(source.model, settings)
    assert (settings.learning_rate_sum, settings.batch_rows) == (
        default_recipe(store.n_rows).optimizer(store.n_rows).learning_rate_sum,
        16,
    )
    curvature = Curvature(CorpusMoments(gradients.engine.model.vocab_size))
    raw_NK = torch.cat([gradients.compute([example])[0] for example in examples])
    curvature._add(len(raw_NK), raw_NK.double().sum(dim=0), raw_NK.double().square().sum(dim=0))
    training = {"learning_rate_sum": settings.learning_rate_sum, "batch_rows": settings.batch_rows}
    curvature.measure(
        gradients, [examples[i] for i in sorted(measured)], **training, seed=settings.seed, advance=ignore
    )
    unit_EK, _ = unit_gradients(gradients, units, np.arange(len(units)), np.ones(len(units)), len(units), curvature)
    labels_N1 = np.array([example.labels for example in examples])[:, None]
    expected_NE = labels_N1 * (raw_NK @ unit_EK.float().T).numpy()
    np.testing.assert_allclose(relevance(built), expected_NE, atol=2**-7 * np.abs(expected_NE).max())


def test_rows_without_a_finite_gradient_are_named_and_counted(root, tmp_path, monkeypatch):
    real = Gradient.score

    def broken(kernel, batch):
        batch.gradient_BK[0, 0] = torch.inf
        return real(kernel, batch)

    monkeypatch.setattr(Gradient, "score", broken)
    notes = Notes()
    artifact = ArtifactReader.open(build_artifact(world(root, train="further"), tmp_path / "art", progress=notes))
    zero_N = ~relevance(tmp_path / "art").any(axis=1)
    assert artifact.manifest.skipped["gradients"] == zero_N.sum() > 0
    first = artifact.rows(np.flatnonzero(zero_N)[:1])["row_id"][0].as_py()
    assert any("no finite gradient" in line and first in line for line in notes.lines)
