"""Keep the small files of a finished environment, so that predictions can be compared again without retraining.

python experiments/environment_files.py bench-out/environments/cc-topic experiments/environments/cc-topic
"""

import argparse
from pathlib import Path

from grasp.files import write_atomically
from grasp.runs.retrained import REFERENCE, RetrainedRuns
from grasp.runs.training_runs import INFO, SUBSETS, UTILITIES

MAX_SUBSETS_BYTES = 1_000_000  # of a committed copy; a larger table is regenerated from its family instead


def copy_small_files(
    environment: RetrainedRuns, out: Path, *, max_subsets_bytes: int = MAX_SUBSETS_BYTES
) -> dict[str, int]:
    """Copy the small files of a complete environment; returns bytes by file name.

    subsets.parquet is left out where it is larger than `max_subsets_bytes` and the family can draw it again; the
    checksum of the masks proves that what is drawn is what was trained on.
    """
    environment.compact()
    out.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for name in (SUBSETS, UTILITIES, REFERENCE, INFO):
        source = environment.path / name
        if not source.exists():
            continue
        data = source.read_bytes()
        if name == SUBSETS and environment.info.family is not None and len(data) > max_subsets_bytes:
            continue
        write_atomically(out / name, data)
        sizes[name] = len(data)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for name, size in copy_small_files(RetrainedRuns.open(args.environment), args.out).items():
        print(f"{args.out / name}: {size:,} bytes")


if __name__ == "__main__":
    main()
