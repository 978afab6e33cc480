"""What `benchmarks/peers.py` compares: the model and the rows that all of them read, and how each is called."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB, HIDDEN, LAYERS, HEADS, CONTEXT = 50_304, 160, 6, 4, 8192
UNIT_PROMPT, UNIT_COMPLETION, TARGETS = 20, 5, 4
WIDTH, MODULE_WIDTH = 128, 16


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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w0", pad_token="w0", model_max_length=CONTEXT
    )
    tokenizer.save_pretrained(place)


def settings_of(job: Job, rule: str, train: str = "new") -> Any:
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
            "train": train,
            "features": {
                "rule": rule,
                "sample_positions": max(2, job.rows * job.length // 8),
                "sample_rows": max(1, job.rows // 8),
            },
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


def grasp_build(rule: str, train: str = "new") -> Callable[[Job], int]:
    def run(job: Job) -> int:
        from grasp.pipeline.pipeline import build_artifact  # noqa: PLC0415

        return bytes_below(build_artifact(settings_of(job, rule, train), job.out / "run"), but="tokens")

    return run


def own_method(name: str, **settings: Any) -> Callable[[Job], Path]:
    def run(job: Job) -> Path:
        from grasp.artifact.reader import ArtifactReader  # noqa: PLC0415
        from grasp.methods.contract import MethodInputs  # noqa: PLC0415
        from grasp.methods.registry import configure_methods, score_rows  # noqa: PLC0415

        artifact, out = ArtifactReader.open(job.artifact), job.out / "run"
        material = MethodInputs(artifact, batch_tokens=job.batch * job.length)
        score_rows(configure_methods([name], {name: settings})[0], material, out)
        return out

    return run


def bergson_build(job: Job) -> Path:
    rows = ("--dataset", str(job.place / "rows.jsonl"), "--split", f"train[:{job.rows}]")
    return bergson(job, "build", *rows, "--projection_dim", str(MODULE_WIDTH))


def bergson_trak(job: Job) -> Path:
    options = ("--projection_dim", str(WIDTH), "--projection_target", "global", "--loss_fn", "log_odds")
    rows = ("--data.dataset", str(job.place / "rows.jsonl"), "--data.split", f"train[:{job.rows}]")
    units = ("--query.dataset", str(job.place / "units.jsonl"), "--damping_factor", "0.1")
    return bergson(job, "trak", *rows, *units, *options, "--loss_batch_size", str(job.batch))


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
            log_probs = log_p(net, weights, buffers, ids[None])
            return (log_probs - torch.log1p(-log_probs.exp())).mean()

        @staticmethod
        def get_out_to_loss_grad(net: Any, weights: Any, buffers: Any, batch: Any) -> Any:
            log_probs = log_p(net, weights, buffers, batch[0])
            return (1 - log_probs.exp().mean(1)).clone().detach().unsqueeze(-1)

    model = load(job, "eager")  # torch maps fused attention over rows one by one
    traker_instance = TRAKer(
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
    traker_instance.load_checkpoint(model.state_dict(), model_id=0)
    for ids in row_batches(job):
        traker_instance.featurize(batch=[ids], num_samples=len(ids))
    traker_instance.finalize_features()
    return job.out / "run"


def bytes_below(path: Path, but: str = "") -> int:
    return sum(
        file.stat().st_size
        for file in path.rglob("*")
        if file.is_file() and (not but or but not in file.relative_to(path).parts)
    )


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


TORCH_MODULES, GRASP_MODULES = (
    ("torch", "transformers.models.llama"),
    ("grasp.pipeline.pipeline", "transformers.models.llama"),
)
METHODS = ("grasp.methods.registry", "grasp.methods.contract", *GRASP_MODULES)
CONTENDERS: dict[str, Contender] = {
    "body forward": Contender(body_forward, TORCH_MODULES, (1, 4, 8), "no head"),
    "full forward": Contender(full_forward, TORCH_MODULES, (1, 2, 4), "head and loss at all positions"),
    "forward and backward": Contender(forward_backward, TORCH_MODULES, (1, 2, 4), "gradients of all weights, summed"),
    "grasp build, paper": Contender(
        grasp_build("paper"), GRASP_MODULES, (1, 4, 8), "the paper's kernel; head at 32 positions"
    ),
    "grasp build, default": Contender(grasp_build("default"), GRASP_MODULES, (1, 4, 8), "output_layer, embedding, knn"),
    "grasp build, gradient": Contender(
        grasp_build("default", "further"),
        GRASP_MODULES,
        (1, 4, 8),
        "gradient, output_layer, embedding; forward and backward",
    ),
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
        bergson_build,
        ("bergson.__main__", "bergson.build", *TORCH_MODULES),
        (1, 2, 4, 8),
        "body, 16 x 16 a module, no units",
    ),
    "bergson trak": Contender(
        bergson_trak,
        ("bergson.__main__", "bergson.cli.trak", *TORCH_MODULES),
        (1, 2, 4, 8),
        "body, 128; keeps scores only, so goes over the rows three times",
    ),
    "dattri-llm tracin": Contender(dattri_llm, ("dattri_llm", *TORCH_MODULES), (1, 2, 4, 8), "body, 16 x 16 a module"),
    "traker": Contender(traker, ("trak", *TORCH_MODULES), (1, 2, 4), "body, 128, no units"),
}
