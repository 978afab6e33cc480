"""The rows of `contrasts`: groups that differ much, as conversations whose loss is on the response.

Ten groups are programs: files of installed packages, in the versions that are named here, so that another machine
makes the same rows. A row gives the language and a line, its response is what follows. The other groups are sums,
trivia (CommonsenseQA), pages of the curl manual, and three groups of `instructions.parquet`. Questions are of Python
and of C, from files of which no row is, of sums and of trivia.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from experiments.worlds.setting import (
    LENGTH,
    SYSTEM,
    UNITS_OF_TARGET,
    chat_row,
    others_of,
    unit_line,
    write_parquet,
)
from grasp.errors import GraspError
from grasp.seeds import stream
from grasp.settings import TargetSettings
from grasp.targets import load_units

ROWS, UNITS = 26, 24  # of a group, of a target
SHORTEST, LONGEST, LONGEST_OF_UNIT = 8, 72, 40  # tokens of a response that is a program or a page
PIECE, LONG_LINE = 16, 120  # lines of a file that may make one row; characters
HEAD = 20  # lines of a file, mostly its licence, that are left out where it has more than three times as many
FILES_ASKED = 0.3  # share of a language's files that questions are made of


@dataclass(frozen=True)
class Language:
    """Files of one language in a package."""

    package: str
    version: str
    suffix: str
    inside: str = ""  # part of the path


LANGUAGES = {
    "Python": Language("networkx", "3.6.1", ".py"),
    "C": Language("mypy", "2.4.1", ".c"),
    "C++": Language("torch", "2.13.0", ".h", "torch/include/c10/"),
    "Cython": Language("scikit-learn", "1.9.1", ".pyx"),
    "Fortran": Language("numpy", "2.4.6", ".f90"),
    "JavaScript": Language("playwright", "1.65.2", ".js", "driver/package/lib/"),
    "Jinja": Language("mkdocstrings-python", "2.0.11", ".jinja"),
    "CMake": Language("torch", "2.13.0", ".cmake"),
    "CSS": Language("mkdocs", "1.6.1", ".css"),
    "JSON": Language("cfn-lint", "1.58.0", ".json"),
}
QUESTION_LANGUAGES = ("Python", "C")
INSTRUCTIONS = ("GPTeacher:roleplay", "GPTeacher:codegen", "MedQuAD:3_GHR_QA")
MANUAL = "curl/everything-curl"


def write_contrasts(data: Path, work: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rows as Parquet and questions as a target, once; those of other environments are left out."""
    if (work / "contrasts.parquet").exists():
        return
    maker = _Maker(tokenizer)
    groups: dict[str, list[dict[str, Any]]] = {}
    tasks: dict[str, list[dict[str, Any]]] = {}
    for name, language in LANGUAGES.items():
        texts = _texts_of(language)
        cut = round(len(texts) * FILES_ASKED) if name in QUESTION_LANGUAGES else 0
        groups[name] = maker.continued(name, texts[cut:], ROWS, LONGEST)
        if cut:
            tasks[name] = maker.continued(name, texts[:cut], UNITS, LONGEST_OF_UNIT)
    table = pq.read_table(data / "pool.parquet", columns=["doc_id", "text", "source"]).to_pylist()
    pages = [(row["doc_id"], row["text"]) for row in table if row["source"] == MANUAL]
    groups["manual"] = maker.continued("Manual", pages, ROWS, LONGEST)
    for name, lines in (("sums", maker.sums()), ("trivia", maker.trivia())):
        some = [next(lines) for _ in range(ROWS + UNITS)]
        groups[name], tasks[name] = some[:ROWS], some[ROWS:]
    others = others_of(data, work, tokenizer)
    groups |= {name: [row for row in others[name] if row["tokens"] <= LENGTH][:ROWS] for name in INSTRUCTIONS}
    units = "".join(unit_line(name.lower(), row) for name, rows in tasks.items() for row in rows)
    (work / "contrasts-units.jsonl").write_text(units, encoding="utf-8")
    rows = [row | {"group": name} for name, some in groups.items() for row in some]
    write_parquet(work / "contrasts.parquet", pa.Table.from_pylist(rows))


class _Maker:
    """Rows of several kinds; those in which a token spans prompt and response are left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def row(self, doc_id: str, question: str, answer: str) -> dict[str, Any] | None:
        return chat_row(self._tokenizer, doc_id, "", question, answer, system=SYSTEM)

    def continued(self, name: str, texts: list[tuple[str, str]], count: int, longest: int) -> list[dict[str, Any]]:
        """A line is given, the following ones are the response: as many as reach a length that is drawn."""
        pieces = [(f"{where}:{k}", lines) for where, text in texts for k, lines in _pieces(text)]
        drawn = stream(0, "contrasts", "length", name)
        rows: list[dict[str, Any]] = []
        for k in stream(0, "contrasts", "pieces", name).permutation(len(pieces)):
            where, lines = pieces[k]
            wanted = SHORTEST * (longest / SHORTEST) ** drawn.uniform()
            tokens = np.cumsum([len(self._tokenizer(line)["input_ids"]) + 1 for line in lines[1:]])
            response = "\n".join(lines[1 : 2 + int(np.searchsorted(tokens, wanted))]).lstrip()
            row = self.row(where, f"{name}:\n{lines[0]}", response)
            if row is not None and row["tokens"] <= LENGTH and len(rows) < count:
                rows.append(row)
        if len(rows) < count:
            raise GraspError(f"contrasts: {name} has {len(rows)} rows, expected {count}; the files have changed")
        return rows

    def sums(self) -> Iterator[dict[str, Any]]:
        draw = stream(0, "contrasts", "sums")
        while True:
            a, b = (int(10 ** draw.uniform(0.5, 3.5)) for _ in range(2))
            sign, value = (("+", a + b), ("-", a - b), ("*", a * b))[draw.integers(3)]
            row = self.row(f"sum:{a}{sign}{b}", f"{a} {sign} {b} = ?", f"{a} {sign} {b} = {value}")
            if row is not None:
                yield row

    def trivia(self) -> Iterator[dict[str, Any]]:
        many = TargetSettings(names=("commonsense_qa",), units_per_target=4 * UNITS_OF_TARGET)
        for unit in load_units(many).units:
            question = unit.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
            row = self.row(unit.unit_id, question, unit.completion.strip())
            if row is not None:
                yield row


def _texts_of(language: Language) -> list[tuple[str, str]]:
    """Files of a package with their names, in a drawn order."""
    try:
        version_found = version(language.package).split("+")[0]
    except PackageNotFoundError:
        version_found = "missing"
    if version_found != language.version:
        raise GraspError(
            f"contrasts: {language.package} is {version_found}, expected {language.version}, the source of the rows: "
            f"pip install --no-deps {language.package}=={language.version}"
        )
    listed = files(language.package) or []
    source_files = sorted((f for f in listed if f.suffix == language.suffix and language.inside in str(f)), key=str)
    order = stream(0, "contrasts", "files", language.package, language.suffix).permutation(len(source_files))
    return [(str(source_files[k]), source_files[k].read_text(encoding="utf-8")) for k in order]


def _pieces(text: str) -> Iterator[tuple[int, list[str]]]:
    """Parts of a file that do not overlap, with the first line's number among those that are not empty."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and len(line) <= LONG_LINE]
    for start in range(HEAD if len(lines) > 3 * HEAD else 0, len(lines) - 2, PIECE):
        yield start, lines[start : start + PIECE]
