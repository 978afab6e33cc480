"""The language check of the repository finds long sentences, unclear names and phrases of the earlier style."""

import subprocess
import sys

from tools import prose
from tools.prose import style_violations, unclear_names, unclear_phrases

MODULE = '''"""Rows that bear on one
another."""
own_E = load()
def told(aim: int, *, budget: int) -> int:
    kept, rows = aim, [one for one in range(budget)]
    self.found = OWN_COLUMNS = kept  # attributes count; a constant counts only as a whole
    return lambda taken_BK: rows
class Choice:
    learned_curve: int
    alone: int
    asked: int  # stored name
'''
NAMES = [(3, "own_E"), (4, "aim"), (4, "told"), (5, "kept"), (5, "one"), (6, "found"), (7, "taken_BK"), (8, "Choice")]


def test_unclear_names_of_a_module_are_listed_with_their_lines():
    assert sorted(unclear_names(MODULE)) == [*NAMES, (10, "alone")]
    used = "from hypothesis import given\n@given(within=1)\ndef test(rows):\n    rows.kept()\n"
    assert list(unclear_names(used)) == []
    assert len(style_violations("planted.md", MODULE)) == 1  # names are those of Python files


def test_phrases_are_listed_with_a_replacement_and_across_line_breaks():
    text = "First line.\nThe rule\nwhat\nships, there and\nback."
    assert sorted(unclear_phrases(text)) == [
        (3, "what ships", "the default, the built-in scoring rule"),
        (4, "there and back", "forward and backward pass"),
    ]


def test_the_command_fails_for_a_planted_file_and_passes_without_it(tmp_path, monkeypatch, capsys):
    def run_check() -> tuple[int, str]:
        code = prose.main()
        return code, capsys.readouterr().out

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "clean.md").write_text("# A page\n\nOne short sentence follows another.\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["prose.py"])
    assert run_check() == (0, "")
    package = tmp_path / "src" / "grasp"
    package.mkdir(parents=True)
    (package / "planted.py").write_text("said = 1  # to bear on it\n")
    phrase, name = "phrase 'bear on': write 'affects'", "name 'said': name what the value is"
    assert run_check() == (1, "".join(f"src/grasp/planted.py:1: {fault}\n" for fault in (name, phrase)))
