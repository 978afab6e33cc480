"""Which methods there are. A new one is one line here; its module is imported when it is asked for."""

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from grasp.baselines.base import Method
from grasp.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Entry:
    """A method by name."""

    name: str
    says: str  # one line for `grasp methods`
    where: str  # module:class

    def load(self) -> type[Method]:  # type: ignore[type-arg]
        """The class; its module is imported here, and torch only with those that need it."""
        module, _, name = self.where.partition(":")
        found: type[Method] = getattr(import_module(f"grasp.baselines.{module}"), name)  # type: ignore[type-arg]
        return found


METHODS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("bm25", "words that row and unit share, weighed by rarity", "bm25:Bm25"),
        Entry("overlap", "share of the unit's words that the row has", "overlap:Overlap"),
        Entry("inrun", "Shapley values of each training step's batch, added up over one replay", "inrun:InRun"),
        Entry(
            "activation_similarity",
            "cosine of mean final hidden states",
            "activation_similarity:ActivationSimilarity",
        ),
        Entry("knn_shapley", "who is near a unit's hidden states and has its next token", "knn_shapley:KnnShapley"),
        Entry(
            "retraining_shapley",
            "Shapley values of rows or groups by retraining on coalitions",
            "retraining_shapley:RetrainingShapley",
        ),
        Entry("datamodels", "linear functions of the subset fitted on retraining: an oracle", "datamodels:Datamodels"),
        Entry("tracin", "cosines of gradients, over checkpoints by learning rate", "tracin:TracIn"),
        Entry("trak", "a Newton step in a random projection, over an ensemble of checkpoints", "trak:Trak"),
        Entry("less", "gradients of units against Adam's steps on rows, normalised (adapted)", "less:Less"),
        Entry("datainf", "influence by a closed form, layer by layer (adapted)", "datainf:DataInf"),
        Entry("influence", "inverse Fisher matrix by K-FAC or EK-FAC: last layer or all", "influence:Influence"),
        Entry("grad_cos", "exact cosine of whole gradients at the last checkpoint", "grad_cos:GradCos"),
        Entry("random", "a random number a row: what no information gives", "trivial:Random"),
        Entry("length", "tokens of the row", "trivial:Length"),
        Entry("loss", "loss of the reference model on the row: low first, as perplexity filters do", "trivial:Loss"),
    )
}


def entry_of(name: str, where: str = "method") -> Entry:
    """A method by name.

    Args:
        where: what a message names.
    Raises:
        SettingsError: no such method; the message lists those there are.
    """
    if name not in METHODS:
        close = get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise SettingsError(f"{where}: got {name!r}; {hint}there are {', '.join(METHODS)}")
    return METHODS[name]
