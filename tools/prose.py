"""Check the language of the repository: sentence lengths, and names and phrases that are not standard English.

Start with `main`.

python tools/prose.py            print every violation as file:line, with exit code 1 if there is any
python tools/prose.py --list     print the sentence statistics of every page and module

Two checks:
- Pages (Markdown) and printed messages (strings of src/grasp) have limits on the length of sentences and table cells.
- No name or phrase of an earlier house style: names by the syntax tree of Python files, phrases in any text.
"""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MAX_MEAN, MAX_SENTENCE, MAX_CELL = 18, 40, 15  # words
MIN_MESSAGE = 6  # words of a string that counts as a printed sentence
# A map from labels of the paper to functions: names, not prose.
NOT_PROSE = {"docs/paper_map.md"}
# Generated from results: cells are checked, sentences are not.
GENERATED = {"table.md", "tables.md", "related.md", "cc.md", "pool.md"}

# Where names and phrases are checked: files, and directories with everything below them.
STYLE_SCOPE = (
    "README.md",
    "docs",
    "src/grasp",
    "benchmarks",
    "experiments",
    "tests",
    "tools",
)
STYLE_SUFFIXES = {".css", ".html", ".ipynb", ".js", ".md", ".py"}
# These quote what they look for.
STYLE_EXEMPT = {"tools/prose.py", "tests/test_prose.py"}

# Names that do not say what the value is: use the noun of what it holds (`kernel`, `matches`, `overrides`, `notes`).
_NAMES = """one own found said told asked aim given made kept taken so again beside alone within joined learned learning
taught mistake room choice declared sealed counted foretold foretell tell meant also such whose here there ahead way
road house"""
UNCLEAR_NAMES = frozenset(_NAMES.split())
# Names of earlier versions that must not be defined again.
_RETIRED = """Environment EnvironmentDataError EnvironmentInfo Exposure Limits Outside base_C ANY_TEXT interacts
searches own_directory rule_of exposure_of"""
RETIRED_NAMES = frozenset(_RETIRED.split())
# Phrases of the earlier style, as regular expressions, with what to write instead.
UNCLEAR_PHRASES = {
    r"there and back": "forward and backward pass",
    # quoted, after a colon, or in "NAME, with what ships" it is a method name in stored results of experiments
    r"\bthe one that ships\b|(?<![\"(])(?<!:\s)(?<!with\s)\bwhat ships\b": "the default, the built-in scoring rule",
    r"\bbears? on\b": "affects",
    r"\blets? go\b": "releases",
    r"\bas it is told\b|\bis told of\b|\bwhat it is told\b": "receives",
    r"\ba (?:line|column) an? (?:mixture|target|run|row|value|label|unit|slice|method)\b": "one row per ...",
    r"\ba point a subset\b": "one point per subset",
    r"\bchange hands\b": "are reallocated",
    r"\bstands? below\b": "follows",
    r"\bneither chosen nor left out\b": "not considered",
    r"\bis believed\b": "is used",
    r"\bof strangers\b": "untrusted",
    r"\bforetell|\bforetold": "predict, forecast",
    r"\bwhatever else is kept\b": "independently of other rows",
    r"\bto the fore\b|\bat least so much\b": "at least this share of",
    r"\btargets of the runs teach\b": "all targets of the runs are used for fitting",
    r"\bthe best that the runs lead to\b": "the optimum predicted by the runs",
    r"\bthat no model reads\b": "too large for a model",
    r"\bhouse word": "term",
    r"\bnats an? (?:token|label|unit)\b": "nats per token",
    r"\blead to expect\b": "predict",
    r"\bclause stands\b": "is printed if",
    r"\bthat say most of\b": "most informative about",
    r"\bruns' own family\b": "the family of the runs",
    r"\bless and less of\b": "decreasingly",
    r"\bas far as the tokens go\b": "until no row fits the remaining tokens",
    r"\bwould settle\b": "would allow a prediction of",
    r"\bnobody (?:asked|counted|on the road)\b": "not requested",
}


class TextStatistics(NamedTuple):
    """Word counts of a page or of the printed strings of a module."""

    sentences: int
    mean: float  # words per sentence
    longest: str
    cell: str  # longest table cell

    def violations(self) -> list[str]:
        """Return one message per limit that is exceeded."""
        messages = []
        if self.mean > MAX_MEAN:
            messages.append(f"sentences have {self.mean:.1f} words on average; at most {MAX_MEAN}")
        if count_words(self.longest) > MAX_SENTENCE:
            length = count_words(self.longest)
            messages.append(f"a sentence of {length} words; at most {MAX_SENTENCE}: {self.longest[:90]}...")
        if count_words(self.cell) > MAX_CELL:
            messages.append(f"a table cell of {count_words(self.cell)} words; at most {MAX_CELL}: {self.cell[:90]}...")
        return messages


def count_words(text: str) -> int:
    """Count words and numbers; code in backticks and an interval in brackets count as one word."""
    text = re.sub(r"`[^`]*`|\[[-+., \d]*\]", "x", text)
    return len([word for word in text.split() if re.search(r"\w", word)])


def split_page(page: str) -> tuple[list[str], list[str]]:
    """Return the paragraphs and the table cells of a Markdown page, without headings and code blocks."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", page)
    texts, cells = [], []
    for block in re.split(r"\n\s*\n", page):
        lines = [line for line in block.splitlines() if not re.match(r"#|---|<|    \S|::: ", line)]
        table = [line for line in lines if line.startswith("|")]
        cells += [cell.strip() for row in table for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
        running = "\n".join(line for line in lines if not line.startswith("|"))
        texts += [" ".join(item.split()) for item in re.split(r"^\s*(?:[-*]|\d+\.)\s+", running, flags=re.MULTILINE)]
    return [text for text in texts if text], cells


def split_sentences(text: str) -> list[str]:
    """Split a paragraph at full stops, question marks and exclamation marks that are followed by a new sentence."""
    return [part for part in re.split(r"(?<=[.!?])[\"*)]*\s+(?=[\"*(`]*[A-Z\d`])", text) if count_words(part) > 1]


def text_statistics(page: str, *, generated: bool = False, module: bool = False) -> TextStatistics:
    """Count the words of a page; of a module only the longest sentence, since messages are made of clauses."""
    texts, cells = split_page(page)
    texts = [] if generated else texts
    sentences = [sentence for text in texts for sentence in split_sentences(text)]
    return TextStatistics(
        sentences=len(sentences),
        mean=statistics.fmean(map(count_words, sentences)) if sentences and not module else 0.0,
        longest=max(sentences, key=count_words, default=""),
        cell=max(cells, key=count_words, default=""),
    )


def printed_text(module: str) -> str:
    """Return the strings of a module except docstrings, one per paragraph, with `x` for values in f-strings."""
    nodes = list(ast.walk(ast.parse(module)))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in ast.walk(node)} - {id(node) for node in formatted}
    texts = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | parts):
            text = node.value
        else:
            continue
        # without punctuation it is a list of words, not a sentence
        texts += [
            line.replace("|", "/")
            for line in text.splitlines()
            if count_words(line) >= MIN_MESSAGE and set(line) & set(".,;:")
        ]
    return "\n\n".join(texts)


def unclear_names(module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every assignment, parameter, function and class whose name says nothing of its value.

    A shape suffix does not make a name clear: `own_E` counts as `own`. Keys of stored files are exempt if their line
    ends with the comment `# stored name`.
    """
    lines = module.splitlines()
    for node in ast.walk(ast.parse(module)):
        for name in _defined_names(node):
            if lines[node.lineno - 1].endswith("# stored name"):
                continue
            noun = name if name.isupper() else re.sub(r"(_[A-Z][A-Za-z0-9]*)+$", "", name)
            is_unclear = noun.strip("_").lower() in UNCLEAR_NAMES or noun.strip("_").startswith("tell_")
            if is_unclear or name in RETIRED_NAMES:
                yield node.lineno, name


def _defined_names(node: ast.AST) -> list[str]:
    """Return the names that a node of a syntax tree defines."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            return [name]
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
    return []


def unclear_phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line of every phrase of the earlier style, the phrase, and what to write instead."""
    for phrase, replacement in UNCLEAR_PHRASES.items():
        for match in re.finditer(phrase.replace(" ", r"\s+"), text, re.IGNORECASE):  # also across a line break
            yield text.count("\n", 0, match.start()) + 1, " ".join(match.group().split()), replacement


def style_violations(path: str, text: str) -> list[str]:
    """Return the unclear names and phrases of a file, one message per occurrence, as `path:line: ...`."""
    messages = []
    if path.endswith(".py"):
        for line, name in unclear_names(text):
            messages.append((line, f"name {name!r}: name what the value is"))
    for line, phrase, replacement in unclear_phrases(text):
        messages.append((line, f"phrase {phrase!r}: write {replacement!r}"))
    return [f"{path}:{line}: {message}" for line, message in sorted(messages)]


def list_files(*patterns: str) -> list[str]:
    """Return the tracked and new files of the repository that match the pathspecs of git, sorted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in output.splitlines() if (ROOT / name).is_file()})


def main() -> int:
    """Print statistics or violations, and return the exit code."""
    has_violations = False
    for name in list_files("*.md", "src/grasp/*.py"):
        if name in NOT_PROSE:
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        module = name.endswith(".py")
        text = printed_text(text) if module else text
        page = text_statistics(text, generated=Path(name).name in GENERATED, module=module)
        if "--list" in sys.argv:
            print(f"{page.mean:5.1f} {count_words(page.longest):4d} {count_words(page.cell):4d}  {name}")
            continue
        for violation in page.violations():
            print(f"{name}: {violation}")
            has_violations = True
    if "--list" in sys.argv:
        return 0
    for name in list_files(*STYLE_SCOPE):
        if Path(name).suffix in STYLE_SUFFIXES and name not in STYLE_EXEMPT:
            for violation in style_violations(name, (ROOT / name).read_text(encoding="utf-8")):
                print(violation)
                has_violations = True
    return int(has_violations)


if __name__ == "__main__":
    sys.exit(main())
