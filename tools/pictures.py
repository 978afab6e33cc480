"""Draw the pictures of README and docs from committed results: python tools/pictures.py"""

import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
INK, QUIET, GOOD, BAD = "#1f2933", "#6b7785", "#2f6f4f", "#a8442a"
# name in experiments/baselines/cc-format.json, label of the bar
METHODS = (
    ("default", "GRASP (built-in rule)"),
    ("influence-ekfac", "EK-FAC influence (backward pass)"),
    ("influence", "last-layer influence (backward pass)"),
    ("knn_shapley", "KNN-Shapley"),
    ("bm25", "BM25"),
    ("grad_cos", "gradient cosine (backward pass)"),
    ("pooled additive", "the paper's relevance, pooled"),
    ("trak", "TRAK (backward pass)"),
    ("tracin", "TracIn (backward pass)"),
    ("random", "random scores"),
)


class Bar(NamedTuple):
    """A named value with its interval."""

    name: str
    value: float
    low: float
    high: float


def chart(bars: list[Bar], title: str, axis: str, *, ceiling: float | None = None, good: int = 1) -> str:
    """Draw horizontal bars with intervals, negative ones to the left of zero. With a ceiling the first bar is GRASP.

    Args:
        good: sign of the values that are drawn in the colour for good.
    """
    width, left, step, top = 720, 250, 26, 58
    low, high = min(0.0, *(bar.low for bar in bars)), max(0.0, *(bar.high for bar in bars), ceiling or 0.0)
    bottom = top + step * len(bars)

    def x(value: float) -> float:
        return round(left + (value - low) / (high - low) * (width - left - 30), 1)

    parts = [_text(16, 26, title, size=15, weight=600), _text(16, 45, axis, colour=QUIET)]
    for i, bar in enumerate(bars):
        y = top + step * i
        ours = ceiling is None or i == 0
        colour = QUIET if not ours else GOOD if good * bar.value > 0 else BAD
        start, end = sorted((x(0), x(bar.value)))
        parts += [
            _text(left - 10, y + 17, bar.name, anchor="end", weight=600 if ours and ceiling else 400),
            f'<rect x="{start}" y="{y + 5}" width="{max(end - start, 0.5):.1f}" height="16" rx="2" fill="{colour}"/>',
            f'<path d="M{x(bar.low)} {y + 13}H{x(bar.high)}" stroke="{INK}" stroke-width="1.5"/>',
        ]
    parts.append(f'<path d="M{x(0)} {top}V{bottom}" stroke="{INK}"/>')
    parts.append(_text(x(0), bottom + 16, "0", anchor="middle", colour=QUIET))
    if ceiling is not None:
        parts.append(f'<path d="M{x(ceiling)} {top}V{bottom}" stroke="{INK}" stroke-dasharray="4 3"/>')
        parts.append(_text(width - 16, bottom + 16, f"ceiling: {ceiling:.2f}", anchor="end", colour=QUIET))
        parts += [
            _text(x(bar.high) + 8, top + step * i + 17, f"{bar.value:.2f}", colour=QUIET) for i, bar in enumerate(bars)
        ]
    return _svg(width, bottom + 28, parts, title)


def evidence() -> str:
    """Draw the rank correlation of each method with retraining."""
    path = ROOT / "experiments" / "baselines" / "cc-format.json"
    averages = {
        result["method"]: result for result in json.loads(path.read_text())["results"] if result["target"] == "average"
    }
    bars = [
        Bar(label, *(averages[name][key] for key in ("mean_lds", "mean_lds_low", "mean_lds_high")))
        for name, label in METHODS
    ]
    title = "Agreement of predictions with retraining"
    axis = "LDS: rank correlation with 64 retrained subsets, mean over 640 questions; with 95 % intervals"
    return chart(bars, title, axis, ceiling=averages["default"]["lds_ceiling"])


def topics() -> str:
    """Draw the predicted change of SciQ without each topic of 10,482 web pages."""
    rows = json.loads((IMAGES / "topics.json").read_text())["topics"]
    bars = [Bar(row["topic"], row["if_dropped"], row["low"], row["high"]) for row in rows]
    bars.sort(key=lambda bar: bar.value)
    title = "Which web pages help on school science questions (SciQ)?"
    return chart(
        [*bars[:7], *bars[-7:]],
        title,
        "predicted change of SciQ without the topic; left of zero is a loss (14 of 23 topics)",
        good=-1,
    )


def relevance() -> str:
    """Draw a token of a row and a token of an answer with similar hidden states and residuals."""
    parts = [
        _text(
            20, 30, "The model reads both texts once and predicts the next token at each position", size=15, weight=600
        ),
        *_sentence(70, "a row of the corpus", ["Plants", "turn", "light", "into", "energy"], 3),
        *_sentence(220, "a question and its answer", ["Leaves", "change", "sunlight", "into", "energy"], 3),
        f'<path d="M408 114V228" stroke="{GOOD}" stroke-width="3"/>',
        _text(420, 144, "similar hidden state?  after “into”: yes", colour=GOOD),
        _text(420, 166, "similar residual?  “the” instead of “energy”: yes", colour=GOOD),
        _text(420, 188, "the row helps on the answer", colour=GOOD, weight=600),
        _text(20, 290, "Relevance is the mean of this product over all pairs of tokens.", colour=QUIET),
    ]
    return _svg(800, 310, parts, "Relevance")


def residual() -> str:
    """Draw the residual at one token: predicted probabilities minus the one-hot vector of the next token."""
    words = [("the", 0.4), ("a", 0.2), ("heat", 0.1), ("energy", -0.9), ("food", 0.05)]
    parts = [_text(20, 28, "Residual at one token: predicted probabilities minus one-hot label", size=15, weight=600)]
    for i, (word, value) in enumerate(words):
        x, height = 60 + 110 * i, abs(value) * 90
        y = 110 - height if value > 0 else 110
        parts.append(
            f'<rect x="{x}" y="{y:.0f}" width="60" height="{height:.0f}" rx="2" fill="{BAD if value > 0 else GOOD}"/>'
        )
        parts.append(_text(x + 30, 228, word, anchor="middle"))
        parts.append(
            _text(x + 30, y - 6 if value > 0 else y + height + 16, f"{value:+.2f}", anchor="middle", colour=QUIET)
        )
    parts.append(f'<path d="M40 110H600" stroke="{INK}"/>')
    parts.append(
        _text(330, 252, "above the line: too likely; below the line: not likely enough", anchor="middle", colour=QUIET)
    )
    return _svg(640, 268, parts, "Residual at one token")


def _sentence(y: int, name: str, words: list[str], marked: int) -> list[str]:
    """Draw words in boxes; the marked one is the current position, the next one is the label."""
    parts = [_text(20, y, name, colour=QUIET)]
    for i, word in enumerate(words):
        x = 20 + 112 * i
        fill = GOOD if i == marked else "#ffffff"
        dashed = ' stroke-dasharray="4 3"' if i > marked else ""
        parts.append(
            f'<rect x="{x}" y="{y + 10}" width="104" height="30" rx="4" fill="{fill}" stroke="{INK}"{dashed}/>'
        )
        parts.append(_text(x + 52, y + 30, word, anchor="middle", colour="#ffffff" if i == marked else INK))
    return parts


def _text(
    x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", colour: str = INK, weight: int = 400
) -> str:
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{escaped}</text>'
    )


def _svg(width: int, height: int, parts: list[str], title: str) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif">\n<title>{title.replace("&", "&amp;")}</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#fbfbf9"/>\n{inner}\n</svg>\n'
    )


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for draw in (evidence, topics, relevance, residual):
        (IMAGES / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
