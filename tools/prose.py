"""Check that pages and printed sentences are easy to read: short sentences and short table cells.

python tools/prose.py            every page and module over a limit, and exit code 1 if there is one
python tools/prose.py --list     every page and module with its figures
"""

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MEAN, LONGEST, CELL = 18, 40, 15
FEWEST = 6  # words of a text that counts as a sentence that is printed
# A map from the paper's labels: names, not prose.
NOT_PROSE = {"docs/paper_map.md"}
# Made by scripts from results: cells are counted, sentences are not.
MADE = {"table.md", "tables.md", "related.md", "cc.md", "pool.md"}


class Figures(NamedTuple):
    """What was counted on a page."""

    sentences: int
    mean: float
    longest: str
    cell: str

    def faults(self) -> list[str]:
        """A line for each limit that the page breaks."""
        found = []
        if self.mean > MEAN:
            found.append(f"sentences have {self.mean:.1f} words on average; at most {MEAN}")
        if words(self.longest) > LONGEST:
            found.append(f"a sentence of {words(self.longest)} words; at most {LONGEST}: {self.longest[:90]}...")
        if words(self.cell) > CELL:
            found.append(f"a table cell of {words(self.cell)} words; at most {CELL}: {self.cell[:90]}...")
        return found


def words(text: str) -> int:
    """Words and numbers; code, a link or an interval in brackets counts as one."""
    text = re.sub(r"`[^`]*`|\[[-+., \d]*\]", "x", text)
    return len([word for word in text.split() if re.search(r"\w", word)])


def paragraphs(page: str) -> tuple[list[str], list[str]]:
    """Running text and table cells of a page; headings and blocks of code are neither."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", page)
    texts, cells = [], []
    for block in re.split(r"\n\s*\n", page):
        lines = [line for line in block.splitlines() if not re.match(r"#|---|<|    \S|::: ", line)]
        rows = [line for line in lines if line.startswith("|")]
        cells += [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
        rest = "\n".join(line for line in lines if not line.startswith("|"))
        texts += [" ".join(item.split()) for item in re.split(r"^\s*(?:[-*]|\d+\.)\s+", rest, flags=re.MULTILINE)]
    return [text for text in texts if text], cells


def sentences(text: str) -> list[str]:
    """Cut at a full stop, question mark or colon that ends one."""
    return [part for part in re.split(r"(?<=[.!?])[\"*)]*\s+(?=[\"*(`]*[A-Z\d`])", text) if words(part) > 1]


def figures(page: str, *, made: bool = False, module: bool = False) -> Figures:
    """Count the words of a page; of a module only the longest sentence, since messages are made of clauses."""
    texts, cells = paragraphs(page)
    texts = [] if made else texts
    found = [sentence for text in texts for sentence in sentences(text)]
    return Figures(
        sentences=len(found),
        mean=statistics.fmean(map(words, found)) if found and not module else 0.0,
        longest=max(found, key=words, default=""),
        cell=max(cells, key=words, default=""),
    )


def printed(module: str) -> str:
    """What a module can print, a paragraph a text: its strings but for docstrings, values in them as `x`."""
    tree = ast.parse(module)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | parts):
            text = node.value
        else:
            continue
        # a list of words is no sentence
        texts += [
            line.replace("|", "/") for line in text.splitlines() if words(line) >= FEWEST and set(line) & set(".,;:")
        ]
    return "\n\n".join(texts)


def pages() -> list[str]:
    """README, docs, experiments and what the package prints, as git knows them."""
    asked = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "*.md",
        "src/grasp/*.py",
    ]
    listed = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return sorted({name for name in listed if name not in NOT_PROSE and (ROOT / name).is_file()})


def main() -> int:
    """Print the figures or the faults; how many pages have one."""
    bad = 0
    for name in pages():
        text = (ROOT / name).read_text(encoding="utf-8")
        module = name.endswith(".py")
        text = printed(text) if module else text
        page = figures(text, made=Path(name).name in MADE, module=module)
        if "--list" in sys.argv:
            print(f"{page.mean:5.1f} {words(page.longest):4d} {words(page.cell):4d}  {name}")
        else:
            print("".join(f"{name}: {fault}\n" for fault in page.faults()), end="")
        bad += bool(page.faults())
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
