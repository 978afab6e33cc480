"""Write docs/howto/model_types.md: what becomes of every causal LM type of the installed transformers.

python tools/model_types.py      two minutes
"""

import re
import sys
import warnings
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models.test_zoo import PAGE, Verdict, examine  # noqa: E402 - of the checkout
from tests.models.zoo import NOT_BUILT, TYPES  # noqa: E402

SHOWN = 4  # names of parameters in a cell

HEAD = """\
# Model types

{counts} A tiny random model of each is compared with itself by `tests/models/test_zoo.py`, with transformers {version}.

*Yes* means: in a padded batch, the loss of every row is that of the row alone. So are its gradients by the output
layer, by the hidden states and by the layers that the gradient kernel looks at. Equal means equal up to rounding.

Encoders such as BERT are tried as decoders, with `is_decoder: true` in their config. Without it they are refused, since
they see the tokens that they predict. Another checkpoint of the same type can still be refused when it is loaded.
[Can my model be read?](models.md) says what is checked then.

The last column names parameters that have no gradient for each row, so that the gradient kernel leaves them out.

| `model_type` | read | why it is refused, or what the gradient kernel leaves out |
|---|---|---|
"""


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    lines, verdicts = [], {}
    for name in TYPES:
        verdict = Verdict(refused=NOT_BUILT[name]) if name in NOT_BUILT else examine(name)
        verdicts[name] = verdict
        kind = "not tried" if name in NOT_BUILT else "refused" if verdict.refused else "yes"
        lines.append(f"| `{name}` | {kind} | {verdict.refused and reason(verdict.refused) or left_out(verdict)} |")
    refused = [name for name, verdict in verdicts.items() if verdict.refused and name not in NOT_BUILT]
    read = len(TYPES) - len(refused) - len(NOT_BUILT)
    counts = (
        f"Of the {len(TYPES)} causal LM types of transformers {read} are read, {len(refused)} are refused by name, and "
        f"{len(NOT_BUILT)} could not be tried."
    )
    PAGE.write_text(HEAD.format(counts=counts, version=transformers.__version__) + "\n".join(lines) + "\n")


def reason(refused: str) -> str:
    """Why, without the name and the numbers."""
    for pattern, why in {
        "not a causal LM": "not causal: a state depends on later tokens",
        "shared_kv_states": "needs the states of another model",
        "ModuleList": "several output layers, one for each codebook",
        "its output layer receives": "two streams of states enter the output layer",
    }.items():
        if re.search(pattern, refused):
            return why
    return refused


def left_out(verdict: Verdict) -> str:
    """Names within a block, each once."""
    names = list(dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", name) for name in verdict.left_out))
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return ", ".join(f"`{name}`" for name in names[:SHOWN]) + more


if __name__ == "__main__":
    main()
