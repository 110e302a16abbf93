"""What a ranking is worth. The reward that trains and the measure that evaluates are the same function."""

from leret.rewards.ranking import MEASURES, Measure, all_found, ap, measure, ndcg, recall, rr, success

__all__ = ["MEASURES", "Measure", "all_found", "ap", "measure", "ndcg", "recall", "rr", "success"]
