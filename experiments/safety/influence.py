"""Influence of rows on queries through the adapters, by EK-FAC as kronfluence computes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from experiments.safety.setting import Row
from experiments.safety.tuned import Batch, Tuned, collate, label_logits
from grasp.arrays import F64

AT_ONCE = 16


class Completion(Task):  # type: ignore[misc]
    """Summed loss on the completions, the adapters' matrices followed."""

    def __init__(self, modules: list[str]) -> None:
        self.modules = modules

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        """Of the labels, or of labels drawn from the model: the Fisher matrix wants those."""
        whole = Batch(*batch)
        logits_PV = label_logits(model, whole)
        label_P = whole.label_BL[whole.label_BL != -100]
        if sample:
            with torch.no_grad():
                label_P = torch.multinomial(logits_PV.softmax(dim=1), 1).flatten()
        return F.cross_entropy(logits_PV, label_P, reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self) -> list[str]:
        return self.modules

    def get_attention_mask(self, batch: Any) -> Tensor:
        return Batch(*batch).real_BL


def ekfac(tuned: Tuned, rows: Sequence[Row], queries: Sequence[Row], work: Path, *, seed: int) -> F64:
    """Influence of each row on each query, (Q, N): positive lowers the query's loss.

    Args:
        work: a directory for factors and scores; emptied by the caller.
    """
    torch.manual_seed(seed)  # labels are drawn from the model
    data = _dataset(tuned, [*rows, *queries])
    n_rows = len(rows)
    model = tuned.model
    names = [
        name for name, named_module in model.named_modules() if isinstance(named_module, nn.Linear) and "lora_" in name
    ]
    task = Completion(names)
    analyzer = Analyzer("safety", prepare_model(model, task), task, cpu=True, output_dir=str(work), disable_tqdm=True)
    train = TensorDataset(*(part[:n_rows] for part in data))
    query_data = TensorDataset(*(part[n_rows:] for part in data))
    analyzer.fit_all_factors("f", train, factor_args=FactorArguments(strategy="ekfac"), per_device_batch_size=AT_ONCE)
    analyzer.compute_pairwise_scores(
        "s",
        "f",
        query_dataset=query_data,
        train_dataset=train,
        score_args=ScoreArguments(damping_factor=None),
        per_device_query_batch_size=len(queries),
        per_device_train_batch_size=AT_ONCE,
    )
    return np.asarray(analyzer.load_pairwise_scores("s")["all_modules"].double().numpy())


def _dataset(tuned: Tuned, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    sequences = tuned.base.sequences(rows, tuned.longest)
    whole = collate(tuned.base.states(sequences), sequences)
    return whole.state_BLH, whole.label_BL, whole.real_BL
