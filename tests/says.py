"""Does a text say all that it should?"""


def says(text: str, *parts: str) -> None:
    """Fails with all parts that are not in the text."""
    assert not [part for part in parts if part not in text], text
