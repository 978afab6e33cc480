"""Small real models of several families, made from configurations, and a small artifact: no download."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grasp.yaml_files import write_yaml
from tests.cli.grasp_command import succeed
from tests.pipeline.world import SKETCHES, world

# How long an example takes says something about the machine, nothing about the law.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
torch.set_num_threads(1)  # for tiny models several threads are slower
os.environ.pop("COLUMNS", None)  # of workers of xdist: tables are those of a pipe

VOCAB = 97

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}


# One path each of a browser, of kills and of real tokenizers is for every day; these others are slow. Files that list
# their own slow tests are not named here.
SECOND_PATHS = (
    "models/test_real_tokenizers.py::test_the_loss_of_a_unit_is_that_of_its_tokens_in_the_whole_text[smollm2]",
    "models/test_real_tokenizers.py::test_the_loss_of_a_unit_is_that_of_its_tokens_in_the_whole_text[deepseek]",
    "pipeline/test_add_replay.py::test_a_replay_killed_at_any_replace_resumes_to_the_same_bytes",
    "pipeline/test_warm_up.py::test_killed_at_any_moment_it_goes_on_to_the_same_bytes",
    "report/test_browser.py::",
)
FIRST_PATHS = (
    "report/test_browser.py::test_nothing_of_the_corpus_runs",
    "report/test_browser.py::test_sliders_moved_by_keyboard_and_mouse_say_what_predict_says",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SECOND_PATHS) and not name.startswith(FIRST_PATHS):
            item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-snapshots", action="store_true", help="rewrite recorded numbers and help")


@pytest.fixture(scope="session", autouse=True)
def no_flush():
    """Disable fsync, which only matters on power loss and takes longer than what is flushed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that installs a package of one module with entry points, in the layout of pip."""

    def installed(module: str, source: str, points: str, package: str | None = None) -> Path:
        package = package or module
        site = tmp_path / package
        record = site / f"{package}-1.0.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text(points)
        (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        return site

    return installed


@pytest.fixture(scope="session")
def rewrite_snapshots(request: pytest.FixtureRequest) -> bool:
    """Return whether recorded files are rewritten instead of compared."""
    return bool(request.config.getoption("--rewrite-snapshots"))


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    return Gemma2ForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "gpt2-tied": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "gemma2-soft-cap": _gemma2,
    "cohere-logit-scale": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "granite-logits-scaling": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
    "phi-head-bias": lambda: PhiForCausalLM(PhiConfig(**{**SHAPE, "num_key_value_heads": 4})),
}


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a small model with weights large enough that its logits differ."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a disk of some kilobytes, or enlarges it if called again."""
    place = tmp_path / "disk"
    place.mkdir()

    def sized(kilobytes: int) -> Path:
        options = f"size={kilobytes}k" + (",remount" if place.is_mount() else "")
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small disk needs root")
        return place

    yield sized
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Write a small world: model/, corpus.jsonl, facts.jsonl, settings.yaml."""
    place = tmp_path_factory.mktemp("cli")
    features = {"kernels": ("output_layer", "embedding", "knn", "pooled", *SKETCHES)}
    write_yaml(world(place, features=features).model_dump(mode="json"), place / "settings.yaml")
    return place


@pytest.fixture(scope="session")
def art(root) -> Path:
    """Build the artifact of the world with the command; no test may change it."""
    succeed("build", "--config", root / "settings.yaml", "--out", root / "art")
    return root / "art"


@pytest.fixture
def own_art(art, tmp_path) -> Path:
    """Return a copy of the artifact that a test may damage."""
    return Path(shutil.copytree(art, tmp_path / "art"))
