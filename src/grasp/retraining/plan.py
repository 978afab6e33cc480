"""Validate and write the plan of a retraining, i.e. recipe, tokenizer, rows, units and subsets, before the first run.

Start with `prepare`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import grasp
from grasp.artifact.label_table import LabelTable, RowBatches
from grasp.corpus import RowStore
from grasp.corpus.sources import open_source
from grasp.errors import RunsError, SettingsError, SubsetError
from grasp.files import atomic_path, claim_directory, discard
from grasp.models.causal_lm import tokenizer_and_context
from grasp.models.checkpoint import device_of, tokenizer_at
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.pipeline.proxy import tokenizer_texts
from grasp.predict.families import parse_family
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.predict.weights import SubsetBlock
from grasp.progress import RetrainStatus
from grasp.retraining.settings import RetrainSettings
from grasp.runs.retrained import MARKER, RetrainedRuns, is_environment
from grasp.runs.training_runs import ALL_SUFFIX, FamilyInfo, RunsInfo, TargetInfo
from grasp.select.matched_repetition import PlannedRun, match_repetition
from grasp.settings import ModelSettings
from grasp.store.locks import locked
from grasp.targets import Unit, UnitSet, load_units
from grasp.targets.units import LOSS, UnitTokens
from grasp.text import json_text
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.training.recipe import RECIPES, TrainingRecipe, named_recipe
from grasp.yaml_files import override_settings, validated, write_yaml

PURPOSE = "evaluation"  # name of the random stream; calibration families have another one
SHARD_ROWS = 4096
TOKENIZER_RECORD = "trained_on.json"  # record in the directory of a tokenizer that was trained on the corpus
FURTHER_CONTEXT = 1024  # default maximum length of rows and units in further training, in tokens
Report = Callable[[RetrainStatus], None]  # callback that receives the stages "tokenizer" and "rows", and notes


def prepare(settings: RetrainSettings, out: Path, report: Report) -> RetrainedRuns:
    """Create or open the directory of a retraining: validate and write rows, units and subsets.

    Only one process prepares a directory; others wait for it.

    Raises:
        GraspError: settings do not fit the corpus, the recipe, or what is already in the directory.
    """
    recipe = resolved_recipe(settings)
    claim_directory(out, MARKER, is_environment)
    with locked(out / MARKER, wait=True):
        if not settings.tokenizer and settings.train == "new":
            directory = out / "tokenizer"
            source, record = open_source(settings.corpus.path, settings.corpus.split), directory / TOKENIZER_RECORD
            trained_on = json_text(
                {
                    "corpus": source.identity(),
                    "settings": settings.corpus.model_dump(mode="json", exclude={"path"}),
                    "vocab_size": recipe.shape.vocab_size,
                }
            )
            known = record.read_text(encoding="utf-8") if record.exists() else ""
            # one of this corpus, or one that runs depend on, is kept
            if not directory.exists() or not (is_environment(out) or known == trained_on):
                report(RetrainStatus("tokenizer"))
                discard(directory)
                texts, vocab_size = tokenizer_texts(settings.corpus), recipe.shape.vocab_size
                with atomic_path(directory) as part:
                    train_tokenizer(texts, vocab_size=vocab_size).save_pretrained(part)
                    (part / TOKENIZER_RECORD).write_text(trained_on, encoding="utf-8")
        tokenizer = tokenizer_of(settings, recipe, out)
        report(RetrainStatus("rows"))
        # Rows of another corpus may be replaced as long as no runs depend on them.
        store = RowStore.write(
            out / "tokens", settings.corpus, tokenizer, shard_rows=SHARD_ROWS, replace=not is_environment(out)
        )
        targets, _ = recorded_units(settings, recipe, tokenizer)
        unknown = [name for name in settings.held_out_targets if name not in targets]
        if unknown:
            raise RunsError(f"held_out_targets: got {unknown}, expected some of {list(targets)}")
        recipe_record: dict[str, Any] = recipe.model_dump(mode="json")  # what determines the training of a run
        if settings.model is not None:
            loss = "dpo" if settings.corpus.form == "preference" else "tokens"
            recipe_record = {"model": settings.model.path, "loss": loss}
            recipe_record |= fine_tuning_recipe(settings).model_dump(mode="json")
        family = FamilyInfo(spec=str(parse_family(settings.family)), seed=settings.family_seed, purpose=PURPOSE)
        info = RunsInfo(
            role=settings.role,
            held_out_targets=settings.held_out_targets,
            recipe=recipe.name,
            recipe_settings=recipe_record,
            checkpoint=f"reference/seed-{settings.seeds[0]}",
            seeds=settings.seeds,
            corpus_fingerprint=store.fingerprint,
            n_rows=store.n_rows,
            targets={
                name: TargetInfo(
                    fingerprint=UnitSet(tuple(units)).fingerprint,
                    loss_on=units[0].loss_on,
                    unit_ids=tuple(unit.unit_id for unit in units),
                )
                for name, units in targets.items()
            },
            family=None if settings.subsets or settings.planned_tokens else family,
            subset_ids=(),
            masks_checksum="",
            made_by={
                "program": f"grasp {grasp.__version__}",
                "torch": torch.__version__,
                "device": str(device_of(settings.device)),
                "corpus": settings.corpus.model_dump(mode="json"),
                "targets": settings.targets.model_dump(mode="json"),
            },
        )
        rows = row_names(store)
        retrained = RetrainedRuns.create(out, info, _subsets(settings, store, rows, recipe, report), rows)
        write_yaml(settings.model_dump(mode="json"), out / "run.yaml")
    return retrained


def resolved_recipe(settings: RetrainSettings) -> TrainingRecipe:
    """Return the recipe with its overrides; of further training, only the context length and the fewest rows of a step.

    Raises:
        ModelError: unknown recipe.
        SettingsError: an override is invalid, or rows exceed the context length.
    """
    max_length = settings.corpus.max_length
    if settings.train == "further":
        shape = RECIPES["tiny"].shape.model_copy(update={"context": max_length or FURTHER_CONTEXT})
        fine_tuning = fine_tuning_recipe(settings)
        batch_rows = fine_tuning.per_device_train_batch_size if fine_tuning.dataloader_drop_last else 1
        return RECIPES["tiny"].model_copy(update={"name": "fine-tuning", "batch_rows": batch_rows, "shape": shape})
    base, overrides = named_recipe(settings.recipe).model_dump(), settings.overrides
    if not isinstance(overrides.get("shape", {}), dict):
        raise SettingsError(
            f"overrides.shape: got {overrides['shape']!r}, expected a group of settings, e.g. {{layers: 2}}"
        )
    recipe = validated(TrainingRecipe, override_settings(base, overrides), "overrides")
    if (max_length or 0) > recipe.shape.context:
        raise SettingsError(
            f"corpus.max_length: got {max_length}, but the context length of recipe {recipe.name} is "
            f"{recipe.shape.context} tokens; set corpus.max_length to {recipe.shape.context}"
        )
    return recipe


def fine_tuning_recipe(settings: RetrainSettings) -> FineTuningRecipe:
    """Return the recipe of further training.

    Raises:
        SettingsError: a value is invalid.
        ModelError: a setting is not supported.
    """
    return FineTuningRecipe.from_mapping(settings.fine_tuning, "fine_tuning")


def fitted_lengths(settings: RetrainSettings) -> RetrainSettings:
    """Return settings whose maximum lengths of rows and units, if not set, are the context length of the recipe."""
    length = {"max_length": resolved_recipe(settings).shape.context}
    groups = {"corpus": settings.corpus, "targets": settings.targets}
    return settings.model_copy(
        update={
            name: group.model_copy(update=length)
            for name, group in groups.items()
            if "max_length" not in group.model_fields_set or getattr(group, "max_length", None) is None
        }
    )


def row_names(store: RowStore) -> RowIndex:
    """Return the index of the row ids of a store."""
    return RowIndex(
        store.n_rows,
        lambda: (store.table(k).column("row_id").combine_chunks() for k in range(store.n_shards)),
    )


def tokenizer_of(settings: RetrainSettings, recipe: TrainingRecipe, out: Path) -> HfTokenizer:
    """Load the tokenizer of the model or of the settings, or the one that was trained on the corpus.

    Raises:
        SettingsError: it does not exist, or its vocabulary is larger than that of the recipe.
    """
    if settings.model is not None:
        return tokenizer_and_context(settings.model)[0]
    vocab_size = recipe.shape.vocab_size
    directory = Path(settings.tokenizer) if settings.tokenizer else out / "tokenizer"
    if not directory.is_dir():
        raise SettingsError(f"tokenizer: got {str(directory)!r}, expected the directory of a tokenizer")
    tokenizer = tokenizer_at("tokenizer", str(directory), ModelSettings(path=str(directory)))
    if len(tokenizer) > vocab_size:
        raise SettingsError(
            f"tokenizer: {directory} has {len(tokenizer)} tokens, the vocabulary of recipe {recipe.name} has "
            f"{vocab_size}; set overrides.shape.vocab_size to {len(tokenizer)} or more"
        )
    return HfTokenizer(tokenizer, vocab_size=vocab_size)


def recorded_units(
    settings: RetrainSettings, recipe: TrainingRecipe, tokenizer: HfTokenizer
) -> tuple[dict[str, tuple[Unit, ...]], list[UnitTokens]]:
    """Return the units of each recorded target, and the tokens of all units in the same order.

    Targets are named e.g. `sciq`, and `sciq@all` for the loss on every token.

    Raises:
        SettingsError: units are longer than the context length of the recipe.
    """
    loaded = load_units(settings.targets).rendered(tokenizer).units
    recorded: dict[str, tuple[Unit, ...]] = {}
    for loss_on in tuple(dict.fromkeys(settings.losses)) or (settings.targets.loss_on,):
        for name in dict.fromkeys(unit.target for unit in loaded if unit.metric == LOSS or loss_on == "completion"):
            recorded_target = tuple(replace(unit, loss_on=loss_on) for unit in loaded if unit.target == name)
            recorded[name + (ALL_SUFFIX if loss_on == "all" else "")] = recorded_target
    units = UnitSet(tuple(chain.from_iterable(recorded.values())))
    tokens = units.tokenize(tokenizer, settings.targets.max_length)
    too_long = [k for k, unit in enumerate(tokens) if unit.longest > recipe.shape.context]
    if too_long:
        raise SettingsError(
            f"targets.max_length: {len(too_long)} units exceed the {recipe.shape.context} tokens of recipe "
            f"{recipe.name}, e.g. {units.units[too_long[0]].unit_id!r} with {tokens[too_long[0]].longest}; "
            f"set targets.max_length to {recipe.shape.context}, here and in the build"
        )
    return recorded, tokens


def _subsets(
    settings: RetrainSettings, store: RowStore, rows: RowIndex, recipe: TrainingRecipe, report: Report
) -> Iterator[SubsetBlock]:
    """Yield the subsets of a file or of a family, each with the rows of a batch at least."""
    if settings.subsets:
        blocks = read_subsets(settings.subsets, rows)
    else:
        family, labels = parse_family(settings.family), None
        if family.label is not None:
            table = LabelTable(
                RowBatches(
                    store.table(0).schema,
                    store.n_rows,
                    lambda names: (
                        batch for k in range(store.n_shards) for batch in store.read_columns(k, names).to_batches()
                    ),
                )
            )
            labels = table.column(family.label, "family")
        n_rows, seed = store.n_rows, settings.family_seed
        blocks = family.draw(settings.n_subsets, n_rows=n_rows, labels=labels, seed=seed, purpose=PURPOSE)
        if plan := PlannedRun.parse(settings.planned_tokens, settings.source_tokens):
            assert labels is not None  # by the settings
            tokens_N = store.lengths()
            run_tokens = recipe.steps * recipe.batch_rows * tokens_N.mean()
            blocks, notes = match_repetition(blocks, plan, labels, tokens_N, run_tokens)
            for note in notes:
                report(RetrainStatus("rows", note=note))
    for block in blocks:
        for name, size in zip(block.subset_ids, block.sizes_B, strict=True):
            if size < recipe.batch_rows:
                raise SubsetError(
                    f"subset {name!r}: retains {size} rows, fewer than the {recipe.batch_rows} of one batch of recipe "
                    f"{recipe.name}; use a larger corpus, another family, or smaller batches"
                )
        yield block
