"""Another seed for the first subsets of an environment: one environment of the subsets that both have, with all seeds.

    python -m experiments.seeds.join experiments/environments/cc-format bench-out/environments/cc-seeds \
        experiments/environments/cc-seeds

Both must be of one corpus, recipe, targets and family; the second one's subsets are the first of the first one's.
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from experiments.mistakes import in_one_line
from grasp.errors import RunsError
from grasp.files import write_atomically
from grasp.runs.retrained import SIGNED_INFO, RetrainedRuns

SAME = ("recipe_settings", "corpus_fingerprint", "n_rows", "targets", "side", "family")
FILES = ("utilities.parquet", "reference.parquet")


def join_environments(first: RetrainedRuns, second: RetrainedRuns, out: Path) -> None:
    """Write the environment with the subsets of `second` and the seeds of both; it appears with its last file."""
    _check(first, second)
    out.mkdir(parents=True, exist_ok=True)
    ids = pa.array([*second.subset_ids, "full"])
    for name in FILES:
        tables = [pq.read_table(environment.path / name) for environment in (first, second)]
        shared_tables = [table.filter(pc.is_in(table["subset_id"], value_set=ids)) for table in tables]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.concat_tables(shared_tables), sink, compression="zstd")
        write_atomically(out / name, sink.getvalue().to_pybytes())
    write_atomically(out / "subsets.parquet", (second.path / "subsets.parquet").read_bytes())
    info = second.info.model_copy(
        update={"seeds": (*first.info.seeds, *second.info.seeds), "checkpoint": first.info.checkpoint}
    )
    SIGNED_INFO.write(out, info)


def _check(first: RetrainedRuns, second: RetrainedRuns) -> None:
    other = [name for name in SAME if getattr(first.info, name) != getattr(second.info, name)]
    if other or first.subset_ids[: len(second.subset_ids)] != second.subset_ids:
        raise RunsError(
            f"{second.path}: differs from {first.path} in {', '.join(other) or 'its subsets'}; expected the same"
        )
    if set(first.info.seeds) & set(second.info.seeds):
        raise RunsError(f"{second.path}: seeds {second.info.seeds}, {first.path} has some of them already")
    rows = [_rows_of(environment, second.subset_ids) for environment in (first, second)]
    if not rows[0].equals(rows[1]):
        raise RunsError(f"{second.path}: subsets of the same name keep other rows than in {first.path}")


def _rows_of(environment: RetrainedRuns, ids: tuple[str, ...]) -> pa.Table:
    table = pq.read_table(environment.path / "subsets.parquet")
    shared = table.filter(pc.is_in(table["subset_id"], value_set=pa.array(ids)))
    return shared.sort_by([("subset_id", "ascending"), ("row_id", "ascending")]).combine_chunks()


@in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    second = RetrainedRuns.open(args.second)
    second.compact()
    join_environments(RetrainedRuns.open(args.first), second, args.out)
    print(f"{args.out}: {len(second.subset_ids)} subsets")


if __name__ == "__main__":
    main()
