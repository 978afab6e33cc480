"""Direction, kind and standard errors of metrics by their name."""

import numpy as np
import pytest

from grasp.runs.metric_names import direction_by_name, is_standard_error, metric_kind, metric_kinds


@pytest.mark.parametrize(
    ("metric", "direction", "kind"),
    [
        ("bbh_salient_translation_error_detection/acc_norm", "higher", "share"),
        ("wic_gloss/acc,none", "higher", "share"),
        ("apple_qa/f1", "higher", "share"),
        ("code_error_fix/pass@1", "higher", "share"),
        ("eval/downstream/arc (length-normalized accuracy)", "higher", "share"),
        ("gsm8k/exact_match,strict-match", "higher", "share"),
        ("cnn/rougeLsum", "higher", "share"),
        ("accounting/loss", "lower", "loss"),
        ("eval/sciq_loss", "lower", "loss"),
        ("val_loss/arxiv", "lower", "loss"),
        ("eval/lm/c4/CrossEntropyLoss", "lower", "loss"),
        ("accents/wer", "lower", "wer"),
        ("wikitext/word_perplexity,none", "lower", "word_perplexity"),
        ("wikitext/bits_per_byte", "lower", "bits_per_byte"),
        ("wic_gloss", None, ""),
        ("eval/bbh_error_detection", None, "bbh_error_detection"),
        ("losses/quality", None, "quality"),
        ("accuracy_of_claims/score", None, "score"),
        ("sciq/neg_mean_squared_error", None, "neg_mean_squared_error"),
    ],
)
def test_a_metric_is_known_by_its_whole_name_and_not_by_that_of_its_task(metric, direction, kind):
    assert direction_by_name(metric) == direction
    assert metric_kind(metric) == kind


def test_shares_above_one_are_percent():
    assert metric_kinds(["sciq/acc", "arc/acc"], np.array([[[0.9, 63.0]], [[0.8, 0.5]]])) == ["share", "percent"]


@pytest.mark.parametrize("name", ["a/acc_stderr", "a/acc_stderr,none", "a/acc_norm_std_err", "a/stderr", "stderr/a"])
def test_standard_errors_are_recognised(name):
    assert is_standard_error(name)
    assert not is_standard_error(name.replace("std", "x"))
