"""The command `grasp demo`: run the example and print its answers."""

import shlex
import time
from pathlib import Path

import typer

from grasp.cli.app import command, option
from grasp.cli.console import program
from grasp.progress_display import Watch

commands = typer.Typer()  # the entry point of the group `grasp.commands`
SECTION = "Build artifacts"  # of `grasp --help`


@command("grasp demo --out demo-out", group=commands, section=SECTION)
def demo(
    out: Path = option("--out DIR", "Directory for all files of the demo.", Path("demo-out")),
) -> None:
    """Run a small example from a corpus to a report, on real text.

    It takes a few minutes on two cores; a second run reuses existing files.
    """
    started = time.monotonic()
    from grasp.demo.demo import make_demo, print_answers

    print("Corpus: 12 sources of text, about 10,000 passages. A small model is trained on them from scratch;")
    print("then a single pass of that model over the corpus gives the features that GRASP needs.")
    with Watch() as watch:
        demo_files = make_demo(out, watch)
    print_answers(demo_files, print)
    art = shlex.quote(str(demo_files.artifact_path))
    print(f"Done in {time.monotonic() - started:.0f} s. All files are in {out}. Try your own queries:")
    print(f"  {program()} predict {art} --drop \"source = 'gsm8k'\"")
    print(f"  {program()} predict {art} --by domain --target openbookqa")
    print(f"  {program()} score {art} --target commonsense_qa --top 20 --min-tokens 32")
