"""Reading, splitting, and inspecting tasks and corpora."""

from leret.datasets.corpus import Corpus
from leret.datasets.load import Data, Loaded, load, load_corpus, load_tasks
from leret.datasets.splits import refuse_leak, split_of

__all__ = ["Corpus", "Data", "Loaded", "load", "load_corpus", "load_tasks", "refuse_leak", "split_of"]
