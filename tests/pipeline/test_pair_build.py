"""Preference pairs as rows: a row is its chosen side minus its rejected side; exports keep the format of TRL."""

import json

import numpy as np
import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore
from grasp.corpus.conversations import read_preference_pair
from grasp.errors import CorpusError, SettingsError, TargetError
from grasp.inspect.explain import Explainer
from grasp.models.build_source import BuildSource
from grasp.pipeline.pipeline import build_artifact
from grasp.select.select import select
from grasp.settings import CorpusSettings, TargetSettings
from grasp.targets import load_units
from tests.corpus.chats import chat_tokenizer, turns
from tests.corpus.world import write_jsonl
from tests.pipeline.world import WORDS, changed, relevance, world

KERNELS = ("output_layer", "embedding", "gradient")


ASK = [{"from": "human", "value": "Hi"}]
FORMS = {
    "texts": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " red."}, "The sky is", " blue.", " red."),
    "implicit text": ({"chosen": "I like cats", "rejected": "I like dogs"}, "I like", " cats", " dogs"),
    "chats": ({"prompt": turns("Hi"), "chosen": turns("", "Yo")[1:], "rejected": turns("", "No")[1:]}, 1, "Yo", "No"),
    "implicit chats": ({"chosen": turns("Hi", "Yo"), "rejected": turns("Hi", "No")}, 1, "Yo", "No"),
    "UltraFeedback": ({"prompt": "Hi", "chosen": turns("Hi", "Yo"), "rejected": turns("Hi", "No")}, 1, "Yo", "No"),
    "LLaMA-Factory": (
        {"conversations": ASK, "chosen": {"from": "gpt", "value": "Yo"}, "rejected": {"from": "gpt", "value": "No"}},
        *(1, "Yo", "No"),
    ),
    "same answers": ({"prompt": "a", "chosen": turns("a", "Yo"), "rejected": turns("a", "Yo")}, 1, "Yo", "Yo"),
    "system": ({"system": "Be.", "prompt": "Hi", "chosen": "Yo", "rejected": "No"}, 2, "Yo", "No"),
    "question": ({"question": "Hi", "chosen": "Yo", "rejected": "No"}, 1, "Yo", "No"),
    "system and question": ({"system": "Be.", "question": "Hi", "chosen": "Yo", "rejected": "No"}, 2, "Yo", "No"),
    "no system": ({"system": None, "prompt": "Hi", "chosen": " Yo", "rejected": " No"}, "Hi", " Yo", " No"),
    "equal texts": ({"question": "Hi", "chosen": "Yo", "rejected": "Yo"}, 1, "Yo", "Yo"),
    "text after chat": ({"prompt": turns("Hi"), "chosen": "Yo", "rejected": "No"}, 1, "Yo", "No"),
}


def stored(tmp_path, records, max_length):
    path = write_jsonl(tmp_path / "pairs.jsonl", records)
    settings = CorpusSettings(path=str(path), form="preference", max_length=max_length)
    return path, RowStore.write(tmp_path / "rows", settings, chat_tokenizer(), shard_rows=8)


@pytest.mark.parametrize(("record", "prompt", "chosen", "rejected"), FORMS.values(), ids=FORMS)
def test_pairs_of_every_form(record, prompt, chosen, rejected):
    content = read_preference_pair(record)
    for side, answer in ((content, chosen), (content.rejected, rejected)):
        if isinstance(prompt, str):
            ((start, stop),) = side.answers
            assert (side.text[:start], side.text[start:stop]) == (prompt, answer)
        else:
            *before, question, reply = (turn["content"] for turn in side.conversation.turns)
            assert before == ["Be."] * (prompt - 1)
            assert (question, reply) == ("a" if record.get("prompt") == "a" else "Hi", answer)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": " b"}, "rejected: missing or empty, but chosen is present"),
        ({"prompt": "a", "chosen": "", "rejected": " b"}, "chosen: missing or empty"),
        ({"prompt": "a", "chosen": None, "rejected": " b"}, "chosen: missing or empty"),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "c", "d", "e")}, "rejected: has 3 turns after the common"),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "")}, "rejected: an answer of the assistant is empty"),
        ({"system": "Be.", "chosen": "a b", "rejected": "a c"}, "system: precedes a prompt, but the pair has none of"),
        ({"prompt": "a", "chosen": " b", "rejected": " c", "tools": [{"name": "f"}]}, "tools: only a chat template"),
        ({"prompt": "a", "chosen": " b", "rejected": " c", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs: "),
    ],
)
def test_a_pair_without_a_side_is_refused_in_one_line(record, message, tmp_path):
    with pytest.raises(CorpusError, match=f"^{message}") as caught:
        read_preference_pair(record)
    assert "\n" not in str(caught.value)
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(TargetError, match=rf"pairs\.jsonl:1: {message}"):
        load_units(TargetSettings(names=(str(path),)))


@pytest.mark.parametrize(("chosen", "rejected"), [("same", "same"), ("The sky", "The sky is red"), ("a b", "a")])
def test_a_pair_without_a_difference_is_left_out_and_named(chosen, rejected, tmp_path):
    records = [FORMS["implicit text"][0], {"chosen": chosen, "rejected": rejected, "id": "equal"}]
    path, store = stored(tmp_path, records, 64)
    assert (store.n_rows, store.skipped.ids) == (1, {"no_loss": ["equal"]})
    with pytest.raises(TargetError, match=r"pairs\.jsonl:2: (chosen|rejected): no text follows the prompt"):
        load_units(TargetSettings(names=(str(path),)))


@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_a_long_pair_keeps_the_prompt_of_both_sides_and_loses_ends_of_answers(kind, tmp_path):
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    lines = [
        ("short", "what is water?", " wet.", " dry."),
        ("long", "what is water?", " wet.", " dry." * 40),
        ("both", "what is water?", " wet." * 40, " dry." * 50),
        ("prompt", "what is water?" * 20, " wet.", " dry."),
    ]
    records = [dict(zip(("id", *roles), line, strict=True)) for line in lines]
    if kind == "chats":
        records = [r | {name: [{"role": roles[name], "content": r[name]}] for name in roles} for r in records]
    _, store = stored(tmp_path, records, 48)
    assert store.skipped.ids == {"cut_end": ["long", "both", "both"], "long_prompt": ["prompt"]}
    sides = store.shard(0).sides()
    assert [len(sides.ids(k)) for k in (3, 4, 5)] == [48] * 3
    starts = [int(np.argmax(sides.mask(k))) for k in range(6)]
    for k in range(1, 6):
        np.testing.assert_array_equal(sides.ids(k)[: starts[k]], sides.ids(0)[: starts[0]])
    assert all(sides.mask(k)[starts[k] :].all() for k in (3, 4, 5))


@pytest.fixture(scope="module")
def pairs(root):
    generator = np.random.default_rng(5)
    records, sides = [], []
    for k in range(20):
        words = [" ".join(generator.choice(WORDS, size=int(n))) for n in generator.integers(1, 9, size=3)]
        record = {"row_id": f"p{k}", "prompt": words[0], "chosen": f" {words[1]}", "rejected": f" {words[2]}."}
        records.append(record | {"topic": "ab"[k % 2]})
        sides += [{"row_id": f"p{k}.{x}", "prompt": words[0], "completion": record[x]} for x in ("chosen", "rejected")]
    write_jsonl(root / "pairs.jsonl", records)
    write_jsonl(root / "sides.jsonl", sides)
    return records


@pytest.fixture(scope="module")
def built(root, pairs):
    artifacts = {}
    settings = world(root, features={"kernels": KERNELS, "sample_positions": 10**6}, train="further")
    for name, form in (("pairs", "preference"), ("sides", "prompt")):
        corpus = {"path": str(root / f"{name}.jsonl"), "form": form, "max_length": 96}  # no side is truncated
        of_form = changed(settings, corpus=corpus, targets={"names": (str(root / "pairs.jsonl"),)})
        artifacts[name] = ArtifactReader.open(build_artifact(of_form, root / f"art-{name}"))
    return artifacts


def test_rows_have_the_tokens_of_both_sides(built):
    pairs, sides = (BuildSource(built[name]).rows for name in ("pairs", "sides"))
    assert (pairs.n_rows, sides.n_rows) == (20, 40)
    split, whole = pairs.rows(np.arange(20)), sides.rows(np.arange(40))
    for field in ("flat_ids", "offsets", "loss_mask"):
        np.testing.assert_array_equal(getattr(split.sides(), field), getattr(whole, field))
    np.testing.assert_array_equal(split.take(np.array([3, 1])).sides().ids(2), split.sides().ids(2))
    assert pairs.longest() == sides.lengths().max()


@pytest.mark.parametrize("kernel", ["output_layer", "embedding"])
def test_relevance_of_a_pair_is_the_difference_of_its_sides(built, kernel):
    counts = BuildSource(built["sides"]).rows.loss_counts()[:, None]
    sum_SE = relevance(built["sides"], kernel) * counts
    expected_NE = (sum_SE[::2] - sum_SE[1::2]) / (counts[::2] + counts[1::2])
    got_NE = relevance(built["pairs"], kernel)
    # positions are the same, so moments are too, up to the order of summation
    np.testing.assert_allclose(got_NE, expected_NE, rtol=0, atol=1e-4 * np.abs(sum_SE).max())


def test_the_gradient_of_a_pair_is_that_of_the_dpo_loss(built):
    """Compare a_ie v / n with the sums of the sides, without second moments, which differ between pairs and sides."""
    pairs, sides = built["pairs"], built["sides"]
    assert sides.manifest.fingerprints["model"] == pairs.manifest.fingerprints["model"]
    from grasp.pipeline.model_pass import ModelPass  # noqa: PLC0415

    source = {name: BuildSource(artifact) for name, artifact in built.items()}
    ready = ModelPass.choose(source["pairs"].model, source["pairs"].settings.features)
    gradient = {}
    for name, origin in source.items():
        rows = origin.rows.rows(np.arange(origin.rows.n_rows))
        by_row = [None] * len(rows)
        for index, batch in ready.batches(rows):
            assert batch.row_P.tolist() == sorted(batch.row_P.tolist())
            for i, g, count in zip(index, batch.gradient_BK.double().numpy(), batch.positions_B.tolist(), strict=True):
                by_row[int(i)] = g * count
        gradient[name] = np.stack(by_row)
    expected = gradient["sides"][::2] - gradient["sides"][1::2]
    # coordinates are rounded to bfloat16, 2^-9 of each side's largest
    close = 2.0**-7 * np.abs(gradient["sides"]).max()
    np.testing.assert_allclose(gradient["pairs"], expected, rtol=0, atol=close)


def test_a_pair_is_explained_word_by_word(built):
    explanation = Explainer(built["pairs"]).explain("pairs", "p3")
    assert abs(explanation.gap) < 2e-2
    assert explanation.table.num_rows == BuildSource(built["pairs"]).rows.lengths()[3]


def test_selected_pairs_are_exported_as_they_are(built, pairs, tmp_path):
    """TRL's DPOTrainer takes `prompt`, `chosen` and `rejected`, explicit or implicit, as texts or messages."""
    select(built["pairs"], budget="5").export(tmp_path / "out", format="jsonl")
    (file,) = (tmp_path / "out").glob("*.jsonl")
    exported = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(exported) == 5
    assert all(record in pairs for record in exported)


def test_pairs_require_further_training(root, pairs, tmp_path):
    corpus = {"path": str(root / "pairs.jsonl"), "form": "preference"}
    with pytest.raises(SettingsError, match=r"--loss dpo.*--train further"):
        build_artifact(changed(world(root, train="new"), corpus=corpus), tmp_path / "art")
