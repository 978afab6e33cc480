"""Functions of label expressions that DuckDB lacks: hosts and domains of URLs, bins of numbers, list members, years.

They are macros of the connection that evaluates an expression; `domain` and `bins` are functions in Python. None of
them reads a file: the public suffix list is part of the package publicsuffixlist. Start with `define`.

    host(url)           host of a URL in lower case, without port and credentials: news.example.co.uk
    domain(url)         registrable domain by the public suffix list: example.co.uk; the host if it has none
    bins(x, edges)      name of the interval that contains x, from ascending edges: 0.5 to 0.8
    has(list, value)    whether a label with several values, stored as a JSON list, contains a value
    year(x), ...        also of ISO 8601 text; no value if it is no date
"""

import functools
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from duckdb.func import ARROW, SPECIAL

from grasp.arrays import F64

GRASP_FUNCTIONS = ("host", "domain", "bins", "has")
DEFAULT_BINS = 5  # of a numeric label that has too many values to be listed
MAX_BINS = 1_000
# After a scheme or `//` anything up to a port or path is the host; without them, words with dots between. Most URLs
# match the first expression, which is fast, since it never has to look back: no credentials, no port, no brackets.
_PLAIN_HOST = r"^[a-zA-Z]+://([^/?#:@\[\s]+)(?:[/?#]|$)"
_URL_HOST = r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*:)?//(?:[^/?#@]*@)?(\[[^\]]*\]|[^/?#:\s]+?)\.?(?:[/?#:\s]|$)"
_BARE_HOST = r"^([a-zA-Z0-9_-]+(?:\.[a-zA-Z0-9_-]+)+)\.?(?:[:/?#]|$)"
# Text such as 2024 and 2024-05 is the beginning of that year or month.
_MOMENT = r"""try_cast(CASE WHEN regexp_full_match(x::VARCHAR, '\d{4}') THEN x || '-01-01'
    WHEN regexp_full_match(x::VARCHAR, '\d{4}-\d\d') THEN x || '-01' ELSE x::VARCHAR END AS TIMESTAMP)"""
_MACROS = {
    "host": f"""host(url) AS lower(CASE
        WHEN ends_with(regexp_extract(url, '{_PLAIN_HOST}', 1), '.')
            THEN rtrim(regexp_extract(url, '{_PLAIN_HOST}', 1), '.')
        WHEN regexp_extract(url, '{_PLAIN_HOST}', 1) <> '' THEN regexp_extract(url, '{_PLAIN_HOST}', 1)
        WHEN regexp_extract(url, '{_URL_HOST}', 1) <> '' THEN regexp_extract(url, '{_URL_HOST}', 1)
        ELSE nullif(regexp_extract(url, '{_BARE_HOST}', 1), '') END)""",
    "domain": "domain(url) AS registrable_domain(host(url))",
    "has": """has(list, value) AS
        CASE WHEN json_valid(list) THEN list_contains(from_json(list, '["VARCHAR"]'), value::VARCHAR) END""",
    **{part: f"{part}(x) AS date_part('{part}', {_MOMENT})" for part in ("year", "month", "day")},
}


def define(db: duckdb.DuckDBPyConnection, names: Collection[str]) -> None:
    """Define those of the functions that are named."""
    if "domain" in names:
        db.create_function("registrable_domain", _domains, ["VARCHAR"], "VARCHAR", type=ARROW, null_handling=SPECIAL)
    if "bins" in names:
        db.create_function("bins", _bins, ["DOUBLE", "DOUBLE[]"], "VARCHAR", type=ARROW, null_handling=SPECIAL)
    for name, macro in _MACROS.items():
        if name in names or (name == "host" and "domain" in names):
            db.execute(f"CREATE MACRO {macro}")


def _domains(hosts: Any) -> pa.Array:
    encoded = pc.dictionary_encode(hosts)
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    names = pa.array([domain_of(host) for host in encoded.dictionary.to_pylist()], pa.string())
    return names.take(encoded.indices)


@functools.lru_cache(maxsize=1 << 20)
def domain_of(host: str) -> str:
    """Return the registrable domain of a host; the host itself if it is an address, a public suffix or a bare name."""
    if host.startswith("[") or host.replace(".", "").isdigit():
        return host
    return _suffixes().privatesuffix(host) or host


@functools.cache
def _suffixes() -> Any:
    from publicsuffixlist import PublicSuffixList  # noqa: PLC0415 - parses the list, only where it is needed

    return PublicSuffixList()


def quantile_edges(values_N: F64, n_bins: int) -> list[float]:
    """Return at most `n_bins - 1` ascending edges of bins with about as many values each; nan is no value.

    Edges are rounded to as few digits as keep them apart, so that they can be read. Values that occur very often make
    fewer bins. No edge is the smallest value, so that no bin is empty.
    """
    values_N = values_N[np.isfinite(values_N)]
    if not len(values_N):
        return []
    exact = np.unique(np.quantile(values_N, np.arange(1, n_bins) / n_bins, method="higher"))
    above = values_N[values_N > values_N.min()]
    if not len(above):
        return []
    exact = exact[exact > values_N.min()] if exact[-1] > values_N.min() else above.min(keepdims=True)
    for digits in range(3, 18):
        edges = [float(f"{edge:.{digits}g}") for edge in exact]
        apart = np.unique(np.searchsorted(edges, values_N, side="right"))
        if len(set(edges)) == len(exact) and len(apart) == len(exact) + 1:
            return edges
    return [float(edge) for edge in exact]


def bin_names(edges: Sequence[float]) -> list[str]:
    """Return the names of the intervals between ascending edges, one more than there are edges."""
    texts = [str(int(edge)) if edge.is_integer() and abs(edge) < 1e15 else repr(edge) for edge in edges]
    between = [f"{low} to {high}" for low, high in pairwise(texts)]
    return [f"below {texts[0]}", *between, f"{texts[-1]} and above"] if texts else ["all"]


def _bins(values: Any, edges: Any) -> pa.Array:
    values_N = np.asarray(pc.fill_null(values, np.nan).to_numpy(), dtype=np.float64)
    if not len(values_N):
        return pa.array([], pa.string())
    edges_K = edges[0].as_py()
    codes_N = np.searchsorted(edges_K, values_N, side="right")
    return pa.array(bin_names(edges_K), pa.string()).take(pa.array(codes_N, mask=np.isnan(values_N)))
