"""GRASP beside the libraries that people would use instead: one command, one run, the same rows, threads and model.

    python benchmarks/peers.py --rows 64 --out bench-out/peers.json                  # about 15 minutes on one core
    python benchmarks/peers.py --rows 64 --only grasp,forward                        # some of them
    python benchmarks/peers.py --peers-path site --out bench-out/peers.json          # with bergson and dattri-llm

The peers are optional; one that is missing or fails is in the table with its error. bergson's own requirements bring
CUDA builds that it does not need; into a folder of their own, without them:

    pip install --target site --no-deps bergson==2.5.1 dattri-llm==0.1.0 peft jaxtyping wadler-lindig ml_dtypes \
        natsort petname simple-parsing docstring-parser torchopt optree graphviz
    pip install traker==0.3.2 datasets accelerate

The model is a Llama with tied embeddings: 10 M parameters, of them 2 M body, vocabulary 50,304, random weights with a
direction that favours frequent tokens as trained models do. Rows are Zipf tokens. Its context is 8,192 though rows
have 512 tokens, since bergson takes no batch beyond the context. Each contender runs in a process of its own, at one
checkpoint, at the batch of rows that was the fastest over a few rows in a process before it. "Imports" are counted
apart, and so is a first run over the few rows, which warms up; "work" is everything after them, loading the model and
the units included; "a row" is the slope between the few rows and all of them, which no fixed cost is part of; so are
bytes a row on disk. CPU seconds are of all threads and children: what to read where the machine is not idle.

What each gradient method covers is the transformer's body, which is all that bergson ever covers; projections are
16 x 16 numbers a module (bergson build, dattri-llm) or 128 in all (TRAK and TracIn). GRASP samples its token moments
from an eighth of the rows, as a corpus of more than a million tokens is sampled; the head is part of what it uses.

The sweep: sums over 100,000 subsets of 1,000 rows at GRASP's 129 floats a row, at the 640 of TRAK with five
checkpoints, at TracIn's scalar, each as a plain NumPy loop and as `Sweep` does it, beside what reading the gathered
numbers once would take at the memory bandwidth of the same run.
"""

import argparse
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

VOCAB, HIDDEN, LAYERS, HEADS, CONTEXT = 50_304, 160, 6, 4, 8192
UNIT_PROMPT, UNIT_COMPLETION, TARGETS = 20, 5, 4
WIDTH, MODULE_WIDTH = 128, 16
SWEEP_WIDTHS = {"GRASP": 129, "TRAK-5": 640, "TracIn": 1}
PREPARATIONS = ("world", "artifact")
PACKAGES = ("torch", "transformers", "bergson", "dattri-llm", "traker")


@dataclass(frozen=True)
class Job:
    """What a child is asked for."""

    root: str
    rows: int
    batch: int  # rows of one forward pass
    threads: int
    length: int
    units: int
    few: int

    @property
    def place(self) -> Path:
        return Path(self.root)

    @property
    def out(self) -> Path:
        return self.place / f"out-{os.getpid()}"

    @property
    def model(self) -> str:
        return str(self.place / "model")

    @property
    def artifact(self) -> Path:
        return self.place / f"artifact-{self.rows}"


# ------------------------------------------------------------------------------------------- what all of them read


def zipf(generator: Any, size: int) -> Any:
    import numpy as np  # noqa: PLC0415

    return np.minimum(generator.zipf(1.2, size=size), VOCAB) - 1


def write_world(job: Job) -> None:
    """The model, its tokenizer, rows and units in the formats of everybody."""
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    generator = np.random.default_rng(0)
    write_model(job.model)
    ids = [zipf(generator, job.length).astype(np.int32) for _ in range(job.rows)]
    np.save(job.place / "rows.npy", np.stack(ids).astype(np.int64))
    pq.write_table(
        pa.table({"row_id": [f"r{i}" for i in range(job.rows)], "input_ids": ids}), job.place / "corpus.parquet"
    )
    units = np.stack([zipf(generator, UNIT_PROMPT + UNIT_COMPLETION) for _ in range(job.units)])
    np.save(job.place / "units.npy", units)
    for t in range(TARGETS):
        with (job.place / f"target-{t}.jsonl").open("w") as file:
            for e in range(t, job.units, TARGETS):
                words = [f"w{token}" for token in units[e]]
                prompt, completion = " ".join(words[:UNIT_PROMPT]), " " + " ".join(words[UNIT_PROMPT:])
                line = {"task": f"target-{t}", "unit_id": str(e), "prompt": prompt, "completion": completion}
                file.write(json.dumps(line) + "\n")
    for name, lines, first in (("rows", np.stack(ids), 0), ("units", units, UNIT_PROMPT)):
        labels = np.where(np.arange(lines.shape[1]) < first, -100, lines)
        columns = {"input_ids": lines.tolist(), "labels": labels.tolist(), "length": [lines.shape[1]] * len(lines)}
        with (job.place / f"{name}.jsonl").open("w") as file:
            for i in range(len(lines)):
                file.write(json.dumps({key: column[i] for key, column in columns.items()}) + "\n")


def write_model(place: str) -> None:
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # the hidden state of a frequent token points to frequent tokens
        frequency = -torch.log(torch.arange(1, VOCAB + 1.0))
        weight = model.model.embed_tokens.weight
        weight.mul_(0.3 / weight.std() / HIDDEN**0.5)
        weight[:, 0] = (frequency - frequency.mean()) / frequency.std() * 0.3
    model.save_pretrained(place)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0", model_max_length=CONTEXT)
    made.save_pretrained(place)


def settings_of(job: Job, match: str) -> Any:
    from grasp.settings import build_settings  # noqa: PLC0415

    return build_settings(
        {
            "model": {
                "path": job.model,
                "threads": job.threads,
                "batch_tokens": job.batch * job.length,
                "device": "cpu",
            },
            "corpus": {"path": str(job.place / "corpus.parquet"), "max_length": job.length, "limit": job.rows},
            "targets": {
                "names": [str(job.place / f"target-{t}.jsonl") for t in range(TARGETS)],
                "units_per_target": None,
            },
            "features": {"match": match, "moment_positions": max(2, job.rows * job.length // 8)},
            "shard_rows": 256,
        }
    )


def load(job: Job, attention: str = "sdpa") -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation=attention).eval()


def row_batches(job: Job) -> list[Any]:
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    return list(torch.split(torch.from_numpy(np.load(job.place / "rows.npy")[: job.rows]), job.batch))


# ------------------------------------------------------------------------------------------- contenders
# Each does the work and gives the directory or the number of bytes that it would keep, None where it keeps nothing.


def body_forward(job: Job) -> None:
    import torch  # noqa: PLC0415

    model = load(job)
    with torch.inference_mode():
        for ids in row_batches(job):
            model.model(input_ids=ids, use_cache=False)


def full_forward(job: Job) -> None:
    import torch  # noqa: PLC0415

    model = load(job)
    with torch.inference_mode():
        for ids in row_batches(job):
            model(input_ids=ids, labels=ids, use_cache=False)


def forward_backward(job: Job) -> None:
    model = load(job)
    for ids in row_batches(job):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()


def grasp_build(match: str) -> Callable[[Job], int]:
    def run(job: Job) -> int:
        from grasp.build.local import build  # noqa: PLC0415

        return bytes_below(build(settings_of(job, match), job.out / "run"), but="tokens")

    return run


def own_method(name: str, **settings: Any) -> Callable[[Job], Path]:
    def run(job: Job) -> Path:
        from grasp.artifact.reader import Artifact  # noqa: PLC0415
        from grasp.baselines.asked import asked_methods  # noqa: PLC0415
        from grasp.baselines.material import Material  # noqa: PLC0415
        from grasp.baselines.predict import scores  # noqa: PLC0415
        from grasp.baselines.stored import Cache  # noqa: PLC0415

        artifact, out = Artifact.open(job.artifact), job.out / "run"
        material = Material(artifact, batch_tokens=job.batch * job.length)
        scores(asked_methods([name], {name: settings})[0], material, Cache.of(artifact, out))
        return out

    return run


def bergson_build(job: Job) -> Path:
    rows = ("--dataset", str(job.place / "rows.jsonl"), "--split", f"train[:{job.rows}]")
    return bergson(job, "build", *rows, "--projection_dim", str(MODULE_WIDTH))


def bergson_trak(job: Job) -> Path:
    own = ("--projection_dim", str(WIDTH), "--projection_target", "global", "--loss_fn", "log_odds")
    rows = ("--data.dataset", str(job.place / "rows.jsonl"), "--data.split", f"train[:{job.rows}]")
    units = ("--query.dataset", str(job.place / "units.jsonl"), "--damping_factor", "0.1")
    return bergson(job, "trak", *rows, *units, *own, "--loss_batch_size", str(job.batch))


def bergson(job: Job, verb: str, *more: str) -> Path:
    from bergson.__main__ import main  # noqa: PLC0415

    out = job.out / "run"
    sys.argv = ["bergson", verb, str(out), "--model", job.model, *more]
    sys.argv += ["--token_batch_size", str(job.batch * job.length)]
    main()
    return out


def dattri_llm(job: Job) -> Path:
    import numpy as np  # noqa: PLC0415
    from dattri_llm import AttributionArguments, AttributionTask, HookManagerConfig, TracInAttributor  # noqa: PLC0415

    def examples(lines: Any, first: int) -> list[dict[str, Any]]:
        import torch  # noqa: PLC0415

        labels = np.where(np.arange(lines.shape[1]) < first, -100, lines)
        return [
            {"input_ids": torch.from_numpy(lines[i]), "labels": torch.from_numpy(labels[i])} for i in range(len(lines))
        ]

    arguments = AttributionArguments(
        output_dir=str(job.out / "run"),
        per_device_train_batch_size=job.batch,
        per_device_eval_batch_size=job.units,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    body = HookManagerConfig(
        linear_io=[r"model\.layers\..*_proj"],
        projection_kwargs={"__default__": {"proj_dim": MODULE_WIDTH, "proj_max_batch_size": 32}},
    )
    task = AttributionTask(loss_func=lambda model, batch: model(**batch, use_cache=False).loss, model=load(job))
    rows, units = np.load(job.place / "rows.npy")[: job.rows], np.load(job.place / "units.npy")
    TracInAttributor(arguments, task=task).attribute(examples(rows, 0), examples(units, UNIT_PROMPT), hook_config=body)
    return job.out / "run"


def traker(job: Job) -> Path:
    import logging  # noqa: PLC0415

    import torch  # noqa: PLC0415
    from trak import TRAKer  # noqa: PLC0415
    from trak.modelout_functions import AbstractModelOutput  # noqa: PLC0415

    def log_p(net: Any, weights: Any, buffers: Any, ids: Any) -> Any:
        logits = torch.func.functional_call(net, (weights, buffers), (ids,)).logits
        return torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]

    class MeanMargin(AbstractModelOutput):
        """The mean log odds of the labels, and 1 - p."""

        def __init__(self) -> None:
            super().__init__()

        @staticmethod
        def get_output(net: Any, weights: Any, buffers: Any, ids: Any) -> Any:
            own = log_p(net, weights, buffers, ids[None])
            return (own - torch.log1p(-own.exp())).mean()

        @staticmethod
        def get_out_to_loss_grad(net: Any, weights: Any, buffers: Any, batch: Any) -> Any:
            own = log_p(net, weights, buffers, batch[0])
            return (1 - own.exp().mean(1)).clone().detach().unsqueeze(-1)

    model = load(job, "eager")  # torch maps fused attention over rows one by one
    made = TRAKer(
        model=model,
        task=MeanMargin(),
        train_set_size=job.rows,
        save_dir=str(job.out / "run"),
        device="cpu",
        proj_dim=WIDTH,
        use_half_precision=False,
        grad_wrt=[name for name, _ in model.named_parameters() if ".layers." in name],
        logging_level=logging.ERROR,
    )
    made.load_checkpoint(model.state_dict(), model_id=0)
    for ids in row_batches(job):
        made.featurize(batch=[ids], num_samples=len(ids))
    made.finalize_features()
    return job.out / "run"


@dataclass(frozen=True)
class Contender:
    """What is run, what it imports first, and what it has to be known by.

    Attributes:
        batches: rows of one forward pass that are tried.
        needs_artifact: GRASP's own gradient methods read rows from an artifact that is made beforehand, not counted.
    """

    run: Callable[[Job], Path | int | None]
    imports: tuple[str, ...]
    batches: tuple[int, ...]
    what: str
    needs_artifact: bool = False


TORCH, OWN = ("torch", "transformers.models.llama"), ("grasp.build.local", "transformers.models.llama")
METHODS = ("grasp.baselines.predict", "grasp.baselines.material", *OWN)
CONTENDERS: dict[str, Contender] = {
    "body forward": Contender(body_forward, TORCH, (1, 4, 8), "no head"),
    "full forward": Contender(full_forward, TORCH, (1, 2, 4), "head and loss at all positions"),
    "forward and backward": Contender(forward_backward, TORCH, (1, 2, 4), "gradients of all weights, summed"),
    "grasp build, pooled": Contender(grasp_build("pooled"), OWN, (1, 4, 8), "the paper's kernel; head at 32 positions"),
    "grasp build, default": Contender(grasp_build("both"), OWN, (1, 4, 8), "pooled, token and input kernels"),
    "own tracin": Contender(
        own_method("tracin", layers="body", dimension=WIDTH, checkpoints="last"), METHODS, (1, 4, 8), "body, 128", True
    ),
    "own trak": Contender(
        own_method("trak", layers="body", dimension=WIDTH, checkpoints="last", ridge=0.1),
        METHODS,
        (1, 4, 8),
        "body, 128",
        True,
    ),
    "bergson build": Contender(
        bergson_build, ("bergson.__main__", "bergson.build", *TORCH), (1, 2, 4, 8), "body, 16 x 16 a module, no units"
    ),
    "bergson trak": Contender(
        bergson_trak,
        ("bergson.__main__", "bergson.cli.trak", *TORCH),
        (1, 2, 4, 8),
        "body, 128; keeps scores only, so goes over the rows three times",
    ),
    "dattri-llm tracin": Contender(dattri_llm, ("dattri_llm", *TORCH), (1, 2, 4, 8), "body, 16 x 16 a module"),
    "traker": Contender(traker, ("trak", *TORCH), (1, 2, 4), "body, 128, no units"),
}


def bytes_below(path: Path, but: str = "") -> int:
    return sum(
        file.stat().st_size
        for file in path.rglob("*")
        if file.is_file() and (not but or but not in file.relative_to(path).parts)
    )


# ------------------------------------------------------------------------------------------- children


def child(what: str, text: str, batches: Sequence[int]) -> None:
    job = Job(**json.loads(text))
    if what == "world":
        write_world(job)
    elif what == "artifact":
        grasp_build_for_methods(job)
    elif what == "sweep":
        print("\n" + json.dumps(sweep(job)))
    else:
        print("\n" + json.dumps(contend(CONTENDERS[what], job, batches)))


def grasp_build_for_methods(job: Job) -> None:
    from grasp.build.local import build  # noqa: PLC0415

    build(settings_of(job, "pooled"), job.artifact)


def contend(contender: Contender, job: Job, batches: Sequence[int]) -> dict[str, Any]:
    """CPU seconds over the few rows at each of `batches`; or of everything at the batch of the job, if there are none.

    Seconds of imports and of work, peak memory, bytes kept; and the same of the few rows.
    """
    begun = stamp()
    for module in contender.imports:
        importlib.import_module(module)
    import torch  # noqa: PLC0415

    torch.set_num_threads(job.threads)
    imports = spent(begun, stamp())
    few = replace(job, rows=job.few)
    if batches:
        once(contender, replace(few, batch=batches[0]))
        return {str(batch): once(contender, replace(few, batch=batch))["work"]["cpu_s"] for batch in batches}
    once(contender, few)
    return {"few": once(contender, few), "imports": imports, **once(contender, job), "peak_bytes": peak_bytes()}


def once(contender: Contender, job: Job) -> dict[str, Any]:
    """One run into an empty directory."""
    job.out.mkdir()
    begun = stamp()
    kept = contender.run(job)
    work = spent(begun, stamp())
    size = bytes_below(kept) if isinstance(kept, Path) else kept
    shutil.rmtree(job.out)
    return {"work": work, "kept_bytes": size}


def stamp() -> tuple[float, float]:
    """Wall and CPU seconds; of the children too, if there are any."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in usage)


def spent(begun: tuple[float, float], done: tuple[float, float]) -> dict[str, float]:
    return {"wall_s": done[0] - begun[0], "cpu_s": done[1] - begun[1]}


def peak_bytes() -> int:
    """Of this process since its program began (ru_maxrss would count the parent's at the fork), or of a child."""
    status = Path("/proc/self/status")
    if not status.exists():
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        own = int(line.split()[1]) * 1024
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def sweep(job: Job) -> dict[str, Any]:
    """Seconds of 100,000 subsets of 1,000 rows at each width, from a few blocks of them, beside the limits."""
    import numpy as np  # noqa: PLC0415
    import sweep as sums  # noqa: PLC0415 - the script beside this one
    import torch  # noqa: PLC0415

    from grasp.utility.sweep import Sweep  # noqa: PLC0415

    torch.set_num_threads(job.threads)
    n_rows = job.rows
    rng = np.random.default_rng(0)
    shape = argparse.Namespace(rows=n_rows, subsets=100_000, size=1_000, block=1_000, rounds=3, width=129)
    blocks, bandwidth = sums.draw_blocks(rng, shape), sums.stream_bandwidth()
    found: dict[str, Any] = {}
    for name, width in SWEEP_WIDTHS.items():
        values = rng.standard_normal((n_rows, width), dtype=np.float32)
        own = Sweep(values)
        own.sums(blocks[0])  # packs
        seconds = min(sums.timed(own.sums, block) for block in blocks) * shape.subsets / shape.block
        plain = min(sums.timed(lambda block, values=values: sums.numpy_loop(values, block), block) for block in blocks)
        limit = shape.subsets * shape.size * width * 4 / bandwidth
        found[name] = {
            "floats": width,
            "sweep_s": seconds,
            "numpy_s": plain * shape.subsets / sums.PLAIN_SUBSETS,
            "limit_s": limit,
        }
    return {
        "rows": n_rows,
        "subsets": shape.subsets,
        "size": shape.size,
        "threads": job.threads,
        "widths": found,
        "stream_bytes_per_s": bandwidth,
        "matmul_multiply_adds_per_s": sums.matmul_flops(shape),
    }


# ------------------------------------------------------------------------------------------- parent


def ask(what: str, job: Job, args: argparse.Namespace, batches: Sequence[int] = ()) -> dict[str, Any]:
    """What one child found, or the error that it ended with."""
    command = [sys.executable, __file__, "--child", what, json.dumps(asdict(job)), *map(str, batches)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit, env=environment(args), check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {args.limit:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return {"error": lines[-1][:400] if lines else f"exit status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1]) if what not in PREPARATIONS else {}


def environment(args: argparse.Namespace) -> dict[str, str]:
    paths = [*args.peers_path, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(args.threads)
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return os.environ | own | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def compare(contender: Contender, name: str, job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """The best batch over a few rows, then all rows at it, or as many as there is time for."""
    batches = [batch for batch in contender.batches if batch <= args.few]
    tried = ask(name, job, args, batches)
    if "error" in tried:
        return {"what": contender.what, "missing": tried["error"]}
    batch = min(batches, key=lambda one: tried[str(one)])
    rows = args.rows
    if not contender.needs_artifact:
        rows = max(2 * args.few, min(rows, int(args.most / tried[str(batch)] * args.few)))
    found = ask(name, replace(job, rows=rows, batch=batch), args)
    if "error" in found:
        return {"what": contender.what, "missing": found["error"]}
    a_row = slope(found["few"], found, rows - args.few)
    return {"what": contender.what, "rows": rows, "batch": batch, **found, "a_row": a_row, "batches_cpu_s": tried}


def slope(few: Mapping[str, Any], many: Mapping[str, Any], rows: int) -> dict[str, float | None]:
    kept = None if many["kept_bytes"] is None else (many["kept_bytes"] - few["kept_bytes"]) / rows
    seconds = {name: (many["work"][name] - few["work"][name]) / rows for name in ("cpu_s", "wall_s")}
    return {**seconds, "bytes": kept}


def packages(args: argparse.Namespace) -> dict[str, str]:
    sys.path[:0] = args.peers_path
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def run(args: argparse.Namespace, root: Path) -> None:
    job = Job(str(root), args.rows, 4, args.threads, args.length, args.units, args.few)
    result: dict[str, Any] = {
        **{name: value for name, value in vars(args).items() if name not in ("out", "peers_path", "only", "resume")},
        "packages": packages(args),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "contenders": {},
    }
    wanted = {name: one for name, one in CONTENDERS.items() if not args.only or any(o in name for o in args.only)}
    made = ask("world", job, args)
    if any(one.needs_artifact for one in wanted.values()):
        made |= ask("artifact", replace(job, rows=args.few), args) | ask("artifact", job, args)
    if "error" in made:
        sys.exit(f"peers: {made['error']}")
    before = earlier(args.out, result) if args.resume else {}
    for name, contender in wanted.items():
        result["contenders"][name] = before.get(name) or compare(contender, name, job, args)
        print(line(name, result["contenders"][name]), flush=True)
        write(result, args.out)
    if not args.only or "sweep" in args.only:
        result["sweep"] = ask("sweep", replace(job, rows=args.sweep_rows), args)
        print(sweep_table(result["sweep"]))
    write(result | {"load_after": os.getloadavg()}, args.out)


def earlier(out: Path | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that was cut off had measured, if it was of the same sizes."""
    if out is None or not out.exists():
        return {}
    then = json.loads(out.read_text(encoding="utf-8"))
    sizes = ("rows", "few", "length", "units", "threads", "packages")
    return then["contenders"] if all(then[name] == now[name] for name in sizes) else {}


def write(result: Mapping[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


COLUMNS = {"": -22, "rows": 5, "batch": 6, "imports": 9, "work": 8, "wall": 8, "ms a row": 10, "peak MB": 9}
HEADING = "".join(f"{name:{'<' if size < 0 else '>'}{abs(size)}}" for name, size in COLUMNS.items()) + "  bytes a row"


def line(name: str, found: Mapping[str, Any]) -> str:
    if "missing" in found:
        return f"{name:22} missing: {found['missing']}"
    kept = found["a_row"]["bytes"]
    return (
        f"{name:22}{found['rows']:>5}{found['batch']:>6}{found['imports']['cpu_s']:>9.1f}{found['work']['cpu_s']:>8.1f}"
        f"{found['work']['wall_s']:>8.1f}{1000 * found['a_row']['cpu_s']:>10.0f}{found['peak_bytes'] / 1e6:>9.0f}"
        f"{'-' if kept is None else f'{kept:,.0f}':>13}  {found['what']}"
    )


def sweep_table(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"sweep: missing: {found['error']}"
    lines = [f"sweep of {found['subsets']:,} subsets of {found['size']:,} rows out of {found['rows']:,}"]
    for name, one in found["widths"].items():
        lines.append(
            f"  {name:8}{one['floats']:>5} floats: Sweep {one['sweep_s']:8.2f} s, NumPy loop {one['numpy_s']:8.2f} s, "
            f"limit of the memory {one['limit_s']:8.2f} s"
        )
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], [int(text) for text in sys.argv[4:]])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--few", type=int, default=8, help="rows that batch sizes are tried on")
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--units", type=int, default=128, help="units of 20 + 5 tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--most", type=float, default=120.0, help="CPU seconds after which a contender gets fewer rows")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one process may take")
    parser.add_argument("--sweep-rows", type=int, default=1_000_000, help="rows of the sweep's corpus")
    parser.add_argument("--peers-path", action="append", default=[], help="a folder that peers are installed in")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts of names, or sweep")
    parser.add_argument("--resume", action="store_true", help="keep what --out has of a run of the same sizes")
    parser.add_argument("--out", type=Path, help="JSON of everything measured")
    args = parser.parse_args()
    print(
        f"{args.rows} rows of {args.length} tokens, {args.units} units, {args.threads} thread(s); CPU seconds, but wall"
    )
    print(HEADING)
    with tempfile.TemporaryDirectory() as directory:
        run(args, Path(directory))


if __name__ == "__main__":
    main()
