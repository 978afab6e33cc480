"""How long will the model be trained?

A budget of T tokens reads a corpus of C tokens T / C times. What that leaves of a change is the law of exposure's
(`grasp.predict.weights.Exposure`): a small choice has a high mean effect and is read often, all rows have the change 0,
and the best budget lies in between. Repetition is counted in rows: a part of the corpus with half of its rows is read
twice as often, whatever their lengths.
"""

from dataclasses import dataclass, replace
from typing import Self

from grasp.choose.amounts import parse_tokens
from grasp.predict.weights import Exposure


@dataclass(frozen=True, slots=True)
class Training:
    """A training budget."""

    tokens: float | None = None  # None: not said; as long as the corpus
    corpus_tokens: int = 1

    @classmethod
    def parsed(cls, train_tokens: str | float | None) -> Self:
        """The budget as it is spelled, e.g. 100B, for a corpus that is not known yet.

        Raises:
            SettingsError: no number of tokens.
        """
        return cls(None if train_tokens is None else parse_tokens(train_tokens))

    def of_corpus(self, tokens: int) -> Self:
        """For a corpus of so many tokens."""
        return replace(self, corpus_tokens=tokens)

    @property
    def epochs(self) -> float:
        """How often the corpus is seen; 1 where no budget was said."""
        return 1.0 if self.tokens is None else self.tokens / self.corpus_tokens

    @property
    def exposure(self) -> Exposure:
        """What rows count that are seen more, or less, often."""
        return Exposure(None if self.tokens is None else self.epochs)
