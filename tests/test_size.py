"""tools/size.py counts modules and executed functions, compared with known ones; the package is below its limits."""

import tomllib

import pytest

from tools import size

MODULE = '''"""Docstring
of two lines."""

# a comment
TEXT = """two
lines"""  # of code


class Thing:
    """Docstring."""

    async def work(self):
        """Docstring."""

        def inner():
            raise ValueError(
                # a comment

                f"{TEXT} are not the words", "apart"
            )
'''


def test_lines_of_code_functions_raises_and_words_of_a_module():
    assert size.size_of(MODULE) == {"lines": 20, "code": 8, "functions": 2, "raise": 1, "words": 4}


def test_limits_are_only_lowered(tmp_path):
    limits, numbers = {"whole": {"code": 10, "raise": 3}}, {"whole": {"code": 12, "raise": 2.5}, "roads": {"a b": 4}}
    assert size.above(numbers, limits) == ["whole: code: 12, limit 10", "roads: a b: 4, limit None"]
    size.write_limits(size.lowered(limits, numbers), tmp_path / "size.toml")
    written = tomllib.loads((tmp_path / "size.toml").read_text())
    assert written == {"whole": {"code": 10, "raise": 2.5}, "roads": {"a b": 4}}
    assert size.lowered(written, {}) == written


@pytest.mark.slow
def test_executed_functions_are_below_their_limits():
    roads = size.trace_commands()
    numbers = {name: len(functions) for name, (_, functions) in roads.items()}
    numbers["first row"] = size.first_row(roads["grasp build"][1])
    limits = tomllib.loads(size.LIMITS.read_text(encoding="utf-8"))
    assert size.above({"roads": numbers}, {"roads": limits["roads"]}) == []
