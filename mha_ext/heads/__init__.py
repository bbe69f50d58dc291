"""See the heads of a model: what they look at, how much they do the same, and what happens without them.

record              gathers what the heads do while a model runs as usual: weights and outputs, or statistics
metrics             entropy, distance, similarity of heads and so on, with formulas; Statistics: over many calls
importance          how much a loss depends on each head
randomized          a copy of a model before training, to compare with

gate                multiplies heads inside `with`
prune_heads         removes heads for good; pruned_heads tells which are gone, pruning_curve what masking them costs
head_parameters     the weights of a layer by head

diversity_loss      grows with how alike the heads of a recording are, to be trained away
to_bertviz          the arguments of bertviz's views
plots               the same as matplotlib figures
analysis, page      a Report of a model on texts, and its HTML: what `python -m mha_ext heads` writes
"""

from . import diversity, metrics, plots
from .baseline import randomized
from .bertviz import to_bertviz
from .diversity import diversity_loss
from .importance import importance
from .layout import HeadParameters, head_parameters
from .pruning import PruningCurve, prune_heads, pruned_heads, pruning_curve
from .recording import Attended, LayerRecording, Recording, gate, record
from .statistics import Statistics

__all__ = [
    "Attended",
    "HeadParameters",
    "LayerRecording",
    "PruningCurve",
    "Recording",
    "Statistics",
    "diversity",
    "diversity_loss",
    "gate",
    "head_parameters",
    "importance",
    "metrics",
    "plots",
    "prune_heads",
    "pruned_heads",
    "pruning_curve",
    "randomized",
    "record",
    "to_bertviz",
]
