"""Keep the small files of a finished environment, so that predictions can be compared again without retraining.

python experiments/keep.py bench-out/environments/cc-topic experiments/environments/cc-topic
"""

import argparse
from pathlib import Path

from grasp.runs.environment import Environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for name, size in Environment.open(args.environment).export(args.out).items():
        print(f"{args.out / name}: {size:,} bytes")


if __name__ == "__main__":
    main()
