"""subsets.parquet of an environment: written aside, with a checksum that says what was trained on."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.errors import EnvironmentDataError
from grasp.files import aside
from grasp.predict.blocks import SubsetBlock
from grasp.predict.subset_tables import RowIndex
from grasp.runs.finished_runs import EXAMPLES, FULL


class SubsetTable:
    """Writes subsets.parquet aside while the ids and the running checksum are taken."""

    def __init__(self, path: Path, rows: RowIndex) -> None:
        self._path = path
        self._part = aside(self._path)
        self._row_ids = rows.ids()

    def write(self, blocks: Iterable[SubsetBlock]) -> tuple[tuple[str, ...], list[str]]:
        """Ids, and the checksum after each subset."""
        digest = MaskDigest()
        schema = pa.schema([("subset_id", pa.string()), ("row_id", pa.string())])
        with pq.ParquetWriter(self._part, schema, compression="zstd", compression_level=19) as writer:
            for block in blocks:
                if (block.weights_BN.data != 1.0).any():
                    raise EnvironmentDataError(f"{self._path}: weighted subsets cannot be retrained; drop the weights")
                digest.add(block)
                names = pa.array(block.subset_ids, pa.string()).take(
                    pa.array(np.repeat(np.arange(len(block.subset_ids)), block.sizes_B))
                )
                row_ids = self._row_ids.take(pa.array(block.weights_BN.indices)).combine_chunks()
                writer.write_table(pa.table([names, row_ids], schema=schema))
        ids = digest.ids
        if not ids:
            raise EnvironmentDataError(f"{self._path}: got no subsets, expected at least one")
        wrong = sorted({name for name in ids if ids.count(name) > 1} | ({FULL} & set(ids)))
        if wrong:
            raise EnvironmentDataError(
                f"{self._path}: subset ids {wrong[:EXAMPLES]} are repeated or reserved; name every subset once"
            )
        return tuple(ids), digest.checksums

    def publish(self) -> None:
        os.replace(self._part, self._path)

    def remove_part(self) -> None:
        self._part.unlink(missing_ok=True)


class MaskDigest:
    """Running checksum over the ids and rows of subsets, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.ids: list[str] = []
        self.checksums: list[str] = []  # after each subset

    def add(self, block: SubsetBlock) -> None:
        matrix = block.weights_BN
        for b, subset_id in enumerate(block.subset_ids):
            rows = np.sort(matrix.indices[matrix.indptr[b] : matrix.indptr[b + 1]])
            self._digest.update(subset_id.encode() + b"\0" + rows.astype("<i8").tobytes())
            self.ids.append(subset_id)
            self.checksums.append(self._digest.hexdigest())
