"""Log-probs of the loss terms of a packed tree from hidden states: the LM head on the R rows alone, without an R x V
tensor.

    api          hidden states and a tree -> log-probs of the terms
    head         the LM head as one function with its gradient
    dense        ... its part over the vocabulary, and triton, its passes on CUDA
    kept_sets    ... its part over kept sets
    terms        what the parts share
"""

from .api import TermLogProbs, head_log_probs, label_log_probs

__all__ = ["TermLogProbs", "head_log_probs", "label_log_probs"]
