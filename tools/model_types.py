"""Write docs/howto/model_types.md: the support of every causal LM type of the installed transformers.

python -m tools.model_types      takes a minute
"""

import re
import warnings
from collections import Counter

import transformers

from tests.models.test_zoo import PAGE, Verdict, examine
from tests.models.zoo import NOT_BUILT, TYPES

SHOWN = 4  # names of parameters in a cell

HEAD = """\
# Model types

{counts}

A tiny random model of each type was compared with its own autograd, in float64 if its code allows it, by
`tests/models/test_zoo.py` with transformers {version}.

*Yes* means that, in a padded batch, the loss of every row equals that of the row alone, up to rounding. The same holds
for its gradients by the output layer, by the hidden states and by the layers that the gradient kernel samples.

Encoders such as BERT were tested as decoders, with `is_decoder: true` in their config. Without it they are refused,
since they see the tokens that they predict. A particular checkpoint of a supported type can still be refused when it is
loaded; see [the checks](models.md).

The last column names parameters that have no gradient for each row, so that the gradient kernel leaves them out.

| `model_type` | read | reason for refusal, or parameters that the gradient kernel leaves out |
|---|---|---|
"""


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    kinds: dict[str, str] = {}
    cells: dict[str, str] = {}
    for name in TYPES:
        if name in NOT_BUILT:
            kinds[name], cells[name] = "not tested", NOT_BUILT[name]
            continue
        verdict = examine(name)
        kinds[name] = "yes" if verdict.refused is None else "refused"
        cells[name] = left_out(verdict) if verdict.refused is None else reason(verdict.refused)
    count = Counter(kinds.values())
    partly = sum(kinds[name] == "yes" and cells[name] != "" for name in TYPES)
    counts = (
        f"**{count['yes']} of the {len(TYPES)} causal LM types of transformers are read exactly.** {count['refused']} "
        f"are refused, {count['not tested']} could not be tested. Of those that are read, {partly} have parameters "
        "that the gradient kernel leaves out."
    )
    order = sorted(TYPES, key=lambda name: (kinds[name] == "yes", name))  # the exceptions first
    lines = [f"| `{name}` | {kinds[name]} | {cells[name]} |" for name in order]
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
