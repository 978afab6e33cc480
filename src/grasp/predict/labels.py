"""A label column in little memory: the list of its values, and for each row the position of its value in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.text import different

Label: TypeAlias = str | int | float | bool | None
NO_LABEL = "(no label)"
EMPTY = "(empty)"


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """Values in order of first appearance and each row's code, 4 bytes a row; a missing label is `None`."""

    name: str
    values: tuple[Label, ...]
    codes_N: NDArray[np.int32]

    @classmethod
    def of(cls, labels: Sequence[Label], name: str = "label") -> "LabelColumn":
        """From a plain sequence of labels."""
        code_of: dict[Label, int] = {}
        codes_N = np.fromiter((code_of.setdefault(label, len(code_of)) for label in labels), np.int32, len(labels))
        return cls(name, tuple(code_of), codes_N)

    @classmethod
    def of_batches(cls, name: str, batches: Iterable[pa.Array]) -> "LabelColumn":
        """From a column of a table that arrives in batches."""
        code_of: dict[Label, int] = {}
        parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        for batch in batches:
            encoded = batch.dictionary_encode(null_encoding="encode")
            codes = [code_of.setdefault(value, len(code_of)) for value in encoded.dictionary.to_pylist()]
            parts.append(np.asarray(codes, np.int32)[encoded.indices.to_numpy()])
        return cls(name, tuple(code_of), np.concatenate(parts))

    @property
    def n_rows(self) -> int:
        return len(self.codes_N)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Rows per value."""
        return np.bincount(self.codes_N, minlength=len(self.values)).astype(np.int64)

    def names(self) -> tuple[str, ...]:
        """What people call the values, each another name; floors and caps speak of them by it.

        A value goes by its own text: where one is spelled `(no label)`, what has none is `(no label) #2`.
        """
        spelled = [NO_LABEL if value is None else str(value) for value in self.values]
        made = [value is None or not name.strip() for value, name in zip(self.values, spelled, strict=True)]
        order = sorted(range(len(spelled)), key=made.__getitem__)
        names = different([spelled[code] if spelled[code].strip() else EMPTY for code in order])
        of_code = dict(zip(order, names, strict=True))
        return tuple(of_code[code] for code in range(len(spelled)))
