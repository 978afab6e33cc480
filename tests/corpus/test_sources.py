"""Sources of records: their number is estimated without reading all of them."""

import gzip
import json
import random

import pytest

from grasp.corpus.sources import open_source


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_the_length_of_large_json_lines_is_estimated_from_their_beginning(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("grasp.corpus.sources._MEASURED_BYTES", 1 << 18)
    rng = random.Random(0)
    lines = [
        json.dumps({"text": "".join(rng.choices("abcdefgh ", k=rng.randrange(200)))}) + "\n" for _ in range(20_000)
    ]
    for k, part in enumerate((lines[:5_000], lines[5_000:])):
        text = "".join(part).encode()
        (tmp_path / f"{k}{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    # decompression reads a block of 64 kB ahead, a quarter of what is counted here
    assert 0.75 * 20_000 < open_source(str(tmp_path)).approximate_length(1_000) < 1.1 * 20_000
