"""Check printed text by the values and keywords in it, so that a better sentence is not a broken test."""

from collections.abc import Iterable


def assert_mentions(text: str | Iterable[str], *parts: str) -> None:
    """Fail unless the text, or one of several texts, contains every part."""
    texts = [text] if isinstance(text, str) else list(text)
    missing = [[part for part in parts if part not in candidate] for candidate in texts]
    assert not all(missing), f"missing {missing} in {texts}"
