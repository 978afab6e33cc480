"""grasp demo"""

import shlex
import time
from pathlib import Path

import typer

from grasp.cli.app import command
from grasp.cli.options import Quiet
from grasp.cli.progress import Watch


@command("grasp demo --out demo-out")
def demo(
    out: Path = typer.Option(Path("demo-out"), "--out", metavar="DIR", help="Directory for everything the demo makes."),
    quiet: Quiet = False,
) -> None:
    """Everything from a corpus to a report, small, on real text.

    A few minutes on two cores; a second run reuses what is there.
    """
    begun = time.monotonic()
    from grasp.demo import make, tell

    print("12 sources of text, some 10,000 passages. A small model is trained on them here, from scratch;")
    print("then it reads them once more. That one pass is all that GRASP needs.")
    with Watch(quiet=quiet) as watch:
        made = make(out, watch)
    tell(made, print)
    art = shlex.quote(str(made.artifact_path))
    print(f"Done in {time.monotonic() - begun:.0f} s. Everything lies in {out}. Ask it something yourself:")
    print(f"  grasp predict {art} --drop \"source = 'gsm8k'\"")
    print(f"  grasp predict {art} --by domain --target openbookqa")
    print(f"  grasp score {art} --target commonsense_qa --top 20 --min-tokens 32")
