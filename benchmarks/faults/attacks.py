"""Attacks: what a stranger sends, signed anew so that it reaches its reader, and outputs that would replace inputs.

hostile manifest an artifact's: names that lead elsewhere, numbers that cannot be; all who open it refuse it in one
                 line, and so does merge
hostile scorer   its card or its weights: huge sizes, numbers that are not finite, pipes and links
hostile runs     tables to import, and imported runs: columns twice, other types, numbers beyond any use
hostile name     a name with ESC, a line break, a change of direction or a formula in every field that is printed or
                 becomes a path; commands print no control character and write nothing elsewhere
output on input  a command is told to write over something that it reads, or over no regular file; it refuses, and
                 nothing has changed
"""

import json
import os
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

import grasp
from benchmarks.faults.accidents import one_line
from benchmarks.faults.bench import Bench, FaultError, contents
from grasp.artifact.inspection import info, verify
from grasp.artifact.manifest import MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.distil.apply import apply
from grasp.distil.scorer import CARD, WEIGHTS, Scorer
from grasp.errors import ArtifactError, GraspError
from grasp.files import UNSIGNED, entry_of, with_checksum
from grasp.runs.training_runs import INFO, SUBSETS, UTILITIES
from tests.cli.grasp_command import run as grasp_command

PIECES = ("..", "/", "etc", "\\", "C:", "\0", "\n", "\x1b[2J", "~", " ", ".", "a", "rows.parquet", "\u202e", "x" * 200)
NAMES = (
    "\x1b[2Jx",
    "\x1b]0;x\x07",
    "a\nb",
    "\u202ea",
    "=1+1",
    "<script>",
    "../../x",
    "\x9b2J",
    "x" * 5000,
    "a\rb",
    "\u2066a",
)


def signed_again(path: Path, raw: dict[str, Any]) -> None:
    """JSON with the checksum of what it says now."""
    path.write_bytes(with_checksum((json.dumps(raw | {"checksum": UNSIGNED}, indent=1) + "\n").encode()))


def times(root: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()}


# ------------------------------------------------------------------------------------------------------------ artifacts


def hostile_manifest(bench: Bench) -> None:
    """A stranger's manifest, with a signature that is right."""
    path, draw = bench.copy(bench.artifact, "hostile"), bench.draw
    raw = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    middle = "".join(draw.choices(PIECES, k=draw.randrange(1, 4)))
    name = "/" * draw.randrange(2) + middle + draw.choice(["/..", "\t", "//"])
    array = raw["arrays"][draw.choice(sorted(raw["arrays"]))]
    wrong = draw.choice([-1, 0, 1e308, "1", None, [], {}, 10**30, "../x"])
    odd = draw.choice(["x", -1.5, [{}], [[3]], "\x1b[2J"])
    changes: list[Callable[[], object]] = [
        lambda: raw["files"].update({name: {"bytes": draw.randrange(99), "checksum": "0" * 32}}),
        lambda: raw.update({draw.choice(["units", "moments"]): [name]}),
        lambda: array["groups"][0].update(name=name),
        lambda: raw["arrays"].update({name: array}),
        lambda: array.update({draw.choice(["width", "gain", "groups"]): wrong}),
        lambda: array["groups"][0].update({draw.choice(["start", "stop", "dtype"]): draw.choice([-1, 99, "object"])}),
        lambda: raw.update({draw.choice(["n_rows", "shard_rows", "targets", "files", "arrays"]): wrong or -1}),
        lambda: raw["files"].pop(draw.choice([file for file in raw["files"] if file.startswith("arrays/")])),
        lambda: raw["details"].update({draw.choice(["n_tokens", "labels", "build_seconds", "vocab_size"]): odd}),
        lambda: raw["settings"].update({draw.choice(["corpus", "model", "features", "targets"]): odd}),
        lambda: raw["skipped"].update({draw.choice(["rows", "columns"]): draw.choice(["x", {"counts": {"a": "b"}}])}),
    ]
    draw.choice(changes)()
    signed_again(path / MANIFEST, raw)
    before = times(bench.root)
    out = bench.root / "faults" / "merged"
    merged: Callable[[Path], object] = lambda place: grasp.merge([bench.whole("other"), place], out)  # noqa: E731
    for look in (ArtifactReader.open, info, verify, merged):
        try:
            look(path)
        except ArtifactError as err:
            one_line(err)
        else:
            raise FaultError(f"{look} believes {raw['arrays']}, {raw['details']}, {raw['skipped']}")
    if times(bench.root) != before:
        raise FaultError("something was written")


# -------------------------------------------------------------------------------------------------------------- scorers


def tensors(draw: Any) -> bytes:
    """A file of safetensors that says what it likes."""
    shape = draw.choice([[4, 1 << 60], [-1], [16], [1 << 40, 0], [4, 1 << 18], []])
    kind = draw.choice(["F32", "BF16", "F64", "I8", "F8_E5M2", "object"])
    offsets = draw.choice([[0, 64], [64, 0], [0, 1 << 62], [0, 1]])
    header = {draw.choice(["tables", "rarity", "../x"]): {"dtype": kind, "shape": shape, "data_offsets": offsets}}
    text = json.dumps(header).encode()
    length = draw.choice([len(text), 1 << 62, 0])
    return bytes(length.to_bytes(8, "little")) + text + bytes(64)


def hostile_scorer(bench: Bench) -> None:
    """What no scorer can mean is refused by whoever opens it, and nothing outside of it is read."""
    path, draw = bench.copy(bench.whole("distil"), "scorer"), bench.draw
    raw = json.loads((path / CARD).read_text(encoding="utf-8"))
    tables = np.array(draw.choice([np.nan, np.inf, -np.inf, 1e30, -1e20]), np.float32)

    def placed(file: str, make: Callable[[Path], object]) -> None:
        (path / file).unlink()
        make(path / file)

    def weighed(data: bytes) -> None:
        (path / WEIGHTS).write_bytes(data)
        raw["weights"] = entry_of(path / WEIGHTS).model_dump()

    def number() -> None:
        data = bytearray((path / WEIGHTS).read_bytes())
        place = len(data) - 4 * draw.randrange(1, 1 << 18)
        data[place : place + 4] = tables.tobytes()
        weighed(bytes(data))

    odd = draw.choice([-1, 0, 1 << 62, 10**30, 1e308, float("nan"), "x", None, [], {}])
    changes: list[Callable[[], object]] = [
        lambda: raw.update({draw.choice(["rows", "intercept"]): draw.choice([1e308, "x", None, []])}),
        lambda: raw.update(first_bytes=draw.choice([-1, 0, 1 << 62, 10**30, "x"])),
        lambda: raw.update({draw.choice(["quality", "weights", "fingerprints", "made_by"]): odd or -1}),
        lambda: raw["quality"].update(spearman=draw.choice([[1], [float("inf")] * 3, "x"])),
        lambda: raw["weights"].update(bytes=draw.choice([-1, 1 << 40, 1 << 62])),
        lambda: raw.update(run="rm"),
        lambda: weighed(tensors(draw)),
        number,
        lambda: placed(WEIGHTS, os.mkfifo),
        lambda: placed(WEIGHTS, lambda file: file.symlink_to("/etc/passwd")),
    ]
    draw.choice(changes)()
    signed_again(path / CARD, raw)
    out = bench.fresh("scored")
    before = times(bench.root)
    for look in (Scorer.open, lambda place: apply(place, str(bench.root / "many.jsonl"), out)):
        try:
            look(path)
        except ArtifactError as err:
            one_line(err)
        else:
            raise FaultError(f"{look} believes {raw}")
    if times(bench.root) != before:
        raise FaultError("something was written")


# ----------------------------------------------------------------------------------------------------------------- runs


def hostile_runs(bench: Bench) -> None:
    """Tables to import, or runs that are imported already: a refusal in one line, or numbers that are finite."""
    draw = bench.draw
    if draw.random() < 0.5:
        hostile_table(bench)
        return
    path = bench.copy(bench.whole("runs-import"), "runs")
    raw = json.loads((path / INFO).read_text(encoding="utf-8"))
    name = draw.choice((SUBSETS, UTILITIES))
    table = pq.read_table(path / name)
    column = draw.choice(table.column_names)
    values = draw.choice([[None], ["\x1b[2J"], [1e308], [float("nan")], [-1], [[1]], [{"a": 1}], [b"\xff"], [10**18]])
    place = table.column_names.index(column)
    changes: list[Callable[[], pa.Table]] = [
        lambda: table.set_column(place, column, pa.array(values * len(table))),
        lambda: table.drop_columns([column]),
        lambda: table.append_column(column, table[column]),
        lambda: table.slice(0, draw.randrange(2)),
        lambda: pa.concat_tables([table, table]),
    ]
    pq.write_table(draw.choice(changes)(), path / name)
    raw["files"] = {file: entry_of(path / file).model_dump() for file in raw["files"]}
    odd = draw.choice([None, 3, "\x1b[2J", {}, ["x"], "expressions"])
    if draw.random() < 0.3:
        raw[draw.choice(["kind", "label", "metrics", "files"])] = odd
    signed_again(path / INFO, raw)
    refused_or_finite(bench, path)


def hostile_table(bench: Bench) -> None:
    draw, place = bench.draw, bench.fresh("tables")
    place.mkdir()
    files = {}
    for name in ("mixtures.csv", "metrics.csv"):
        lines = [line.split(",") for line in (bench.root / name).read_text(encoding="utf-8").splitlines()]
        files[name] = lines
    lines = files[draw.choice(sorted(files))]
    odd = draw.choice([*NAMES, "1e308", "-1e308", "nan", "inf", "1e-320", "", "9" * 400, "-1", "\xff", "\0"])
    line, column = draw.randrange(len(lines)), draw.randrange(len(lines[0]))
    changes: list[Callable[[], object]] = [
        lambda: lines[line].__setitem__(column, odd),
        lambda: [row.append(row[-1]) for row in lines],
        lambda: [
            row.append(odd if i else draw.choice(["seed", "size", "tokens", "state"])) for i, row in enumerate(lines)
        ],
        lambda: lines.append(lines[-1]),
        lambda: lines.pop(line),
        lines[line].pop,
    ]
    draw.choice(changes)()
    for name, rows in files.items():
        (place / name).write_text("\n".join([*map(",".join, rows), ""]), encoding="latin-1", errors="replace")
    try:
        grasp.import_runs(place / "mixtures.csv", place / "metrics.csv", label="topic", out=place / "runs")
    except GraspError as err:
        one_line(err)
        return
    refused_or_finite(bench, place / "runs")


def refused_or_finite(bench: Bench, runs: Path) -> None:
    """What learns from runs refuses them, or gives numbers."""
    artifact = grasp.open(bench.artifact)
    for ask in (lambda: grasp.mix_runs(runs), lambda: artifact.predict(by="topic", runs=runs)):
        try:
            table = ask().to_arrow()
        except GraspError as err:
            one_line(err)
            continue
        for name in table.column_names:
            if pa.types.is_floating(table[name].type) and not np.isfinite(table[name].drop_null().to_numpy()).all():
                raise FaultError(f"{name} is not finite")


# ---------------------------------------------------------------------------------------------------------------- names


def named_after(bench: Bench, name: str, place: Path) -> tuple[Path, Path, Path, Path]:
    """An artifact, a scorer, imported runs and an environment, copied to a place, with the name wherever one fits."""
    art, scorer, runs, environment = (
        Path(shutil.copytree(bench.whole(verb), place / folder))
        for verb, folder in (("build", "art"), ("distil", "scorer"), ("runs-import", "runs"), ("retrain", "env"))
    )
    manifest = json.loads((art / MANIFEST).read_text(encoding="utf-8"))
    card = json.loads((scorer / CARD).read_text(encoding="utf-8"))
    info = json.loads((runs / INFO).read_text(encoding="utf-8"))
    trained = json.loads((environment / "environment.json").read_text(encoding="utf-8"))
    manifest["made_by"][name] = name
    manifest["fingerprints"][name] = name
    manifest["skipped"] = {"rows": {"counts": {name: 3}, "ids": {name: [name]}}, "columns": [name]}
    manifest["details"]["labels"] = [*manifest["details"]["labels"], name]
    manifest["settings"]["corpus"]["path"] = name
    manifest["settings"]["model"]["path"] = name
    card |= {"target": name, "scored_by": name, "made_by": {name: name}, "fingerprints": {name: name}}
    info |= {"label": bench.draw.choice(["topic", name])}
    trained |= {"recipe": name, "made_by": {name: name}}
    for file in (SUBSETS, UTILITIES):
        table = pq.read_table(runs / file)
        spelled = pa.array([name if i == "run-0" else i for i in table["subset_id"].to_pylist()])
        pq.write_table(table.set_column(table.column_names.index("subset_id"), "subset_id", spelled), runs / file)
    info["files"] = {file: entry_of(runs / file).model_dump() for file in info["files"]}
    signed_again(art / MANIFEST, manifest)
    signed_again(scorer / CARD, card)
    signed_again(runs / INFO, info)
    signed_again(environment / "environment.json", trained)
    return art, scorer, runs, environment


def hostile_name(bench: Bench) -> None:
    """A name of a stranger's in a field that is printed or becomes a path."""
    draw, name = bench.draw, bench.draw.choice(NAMES)
    place = bench.fresh("named")
    place.mkdir()
    art, scorer, runs, environment = named_after(bench, name, place)
    csv = place / "named.csv"
    commands: list[tuple[object, ...]] = [
        ("info", art),
        ("verify", art),
        ("info", scorer),
        ("apply", scorer, "--corpus", bench.root / "many.jsonl", "--out", place / "scored"),
        ("score", art, "--target", "facts", "--labels", "topic"),
        ("score", art, "--target", name),
        ("predict", art, "--by", name),
        ("predict", art, "--drop", f"topic = '{name}'"),
        ("predict", art, "--by", "topic", "--runs", runs),
        ("runs", "mix", runs, "--out", csv),
        ("runs", "propose", runs, "--out", csv),
        ("evaluate", art, "--runs", environment),
        ("explain", art, "--row", name, "--target", "facts"),
        ("distil", art, "--target", name, "--out", place / "learned"),
        ("merge", bench.whole("other"), art, "--out", place / "merged"),
        ("report", art, "--out", place / "page.html", "--explain", "0"),
    ]
    outside = {path: stamp for path, stamp in times(bench.root).items() if not path.is_relative_to(place)}
    for command in draw.sample(commands, 4):
        done = grasp_command(*command)
        if done.code not in (0, 1, 2):
            raise FaultError(f"{command}: exit code {done.code}")
        steering = {
            ch for ch in done.out + done.err if ch not in "\n\r\u200c\u200d" and unicodedata.category(ch)[0] == "C"
        }
        if steering:
            raise FaultError(f"{command} printed {steering}")
    if csv.exists():
        cells = pacsv.read_csv(csv).to_pylist()
        if any(isinstance(cell, str) and cell[:1] in "=+-@" for line in cells for cell in line.values() if cell):
            raise FaultError("a cell of CSV begins a formula")
    if (page := place / "page.html").exists() and "<script>1" in page.read_text(encoding="utf-8"):
        raise FaultError("a name became a script")
    if {path: stamp for path, stamp in times(bench.root).items() if not path.is_relative_to(place)} != outside:
        raise FaultError("something was written elsewhere")


# -------------------------------------------------------------------------------------------------------------- outputs

FILES = (
    ("score", "ART", "--target", "facts", "--out"),
    ("predict", "ART", "--by", "topic", "--out"),
    ("predict", "ART", "--drop", "topic = 'games'", "--runs", "RUNS", "--out"),
    ("select", "ART", "--budget", "20%", "--target", "facts", "--ids-out"),
    ("mix", "ART", "--by", "topic", "--target", "facts", "--weights"),
    ("report", "ART", "--runs", "RUNS", "--out"),
    ("report", "ART", "--previous", "OTHER", "--out"),
    ("explain", "ART", "--target", "facts", "--row", "row-1", "--out"),
    ("evaluate", "ART", "--runs", "ENV", "--json"),
    ("calibrate", "ART", "--runs", "ENV", "--out"),
    ("runs", "predict", "RUNS", "MIXTURES", "--out"),
    ("runs", "mix", "RUNS", "--out"),
    ("runs", "propose", "RUNS", "--art", "ART", "--out"),
    ("runs", "propose", "RUNS", "--art", "ART", "--subsets"),
)
DIRECTORIES = (
    ("distil", "ART", "--out"),
    ("apply", "SCORER", "--corpus", "CORPUS", "--out"),
    ("merge", "ART", "OTHER", "--out"),
    ("runs", "import", "MIXTURES", "METRICS", "--label", "topic", "--out"),
    ("select", "ART", "--budget", "20%", "--target", "facts", "--export"),
    ("build", "--config", "SETTINGS", "--out"),
    ("retrain", "--config", "RETRAINING", "--out"),
)


def output_on_input(bench: Bench) -> None:
    draw = bench.draw
    places = {
        "ART": bench.artifact,
        "OTHER": bench.whole("other"),
        "ENV": bench.environment,
        "RUNS": bench.whole("runs-import"),
        "SCORER": bench.whole("distil"),
        "CORPUS": bench.root / "many.jsonl",
        "MIXTURES": bench.root / "mixtures.csv",
        "METRICS": bench.root / "metrics.csv",
        "SETTINGS": bench.root / "build.yaml",
        "RETRAINING": bench.root / "retrain.yaml",
    }
    one_file = draw.random() < 0.6
    words = draw.choice(FILES if one_file else DIRECTORIES)
    known = [places[word] for word in words if word in places]
    inputs = [file for place in known for file in (place, *place.rglob("*"))]
    if "ART" in words:
        inputs += [bench.root / "corpus.jsonl", bench.root / "facts.jsonl", *(bench.root / "model").glob("*")]
    inputs += [Path("/dev/null"), bench.root]
    if not one_file and not {"build", "retrain"} & {*words}:  # they may lie anywhere but in the place of another file
        inputs += [place / "new" for place in known if place.is_dir()]
    if {"build", "retrain"} & {*words}:
        inputs = [path for path in inputs if not path.is_dir()] + [bench.root, bench.environment / "reference"]
    out = draw.choice(sorted(inputs))
    before = contents(bench.root)
    done = grasp_command(*(str(places.get(word, word)) for word in words), out)
    last = (done.err.splitlines() or [""])[-1]
    if done.code != 2 or not last.startswith("error: ") or "Traceback" in done.err:
        raise FaultError(f"{words} {out}: exit code {done.code}: {done.err[-300:]}")
    if contents(bench.root) != before:
        raise FaultError(f"{words} {out}: something changed")
