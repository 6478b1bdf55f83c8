"""Log-probs of the loss terms of a packed tree from hidden states, only the R rows through the LM head."""

from .api import TermLogProbs, head_log_probs, label_log_probs, term_log_probs

__all__ = ["TermLogProbs", "head_log_probs", "label_log_probs", "term_log_probs"]
