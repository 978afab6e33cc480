"""docs/paper_map.md lists every label of the paper, and only functions and tests that exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LABELS = """
eq:true-subset-utility eq:lds-spearman eq:additive-utility eq:token-residual eq:sequence-pooling
eq:kfac-inner-product eq:grasp-hidden-whiten eq:grasp-components eq:grasp-score eq:grasp-subset-relevance
eq:method-additive thm:smoothness-bound eq:smoothness-lower-bound eq:quadratic-expansion
eq:ideal-interaction-surrogate eq:feature-sketch eq:ia-components eq:component-predictor eq:prelim-utility
eq:prelim-additive eq:prelim-lds eq:weighted-risk eq:first-order-influence prop:endpoint-smoothness
eq:endpoint-smoothness eq:trajectory-mismatch eq:discrete-second-difference eq:ia-discrete-curvature
prop:aligned-submodularity eq:sketched-surrogate eq:sketch-error-bound prop:local-direct-sum
eq:direct-sum-local-bound eq:centered-mean-deviation eq:ratio-scaling eq:pairwise-stability-condition
eq:pairwise-stability-bound
"""
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| label", "| statement"))
]


def named(column):
    return sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[column])})


def test_every_label_is_listed_once_and_exists():
    labels = [label for row in ROWS for label in re.findall(r"`((?:eq|thm|prop):[^`]+)`", row[0])]
    assert labels == LABELS.split()


def test_every_row_is_complete():
    for row in ROWS:
        assert len(row) == 4, row[0]
        assert all(row), row[0]
        assert row[1] in ("-", "not yet") or re.search(r"`(grasp|experiments)\.", row[1]), row[0]
        assert row[2] == "not yet" or "::test_" in row[2], row[0]


@pytest.mark.parametrize("name", [*named(1), *(name for name in named(3) if name.startswith("grasp."))])
def test_functions_exist(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", named(2))
def test_tests_exist(name):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
