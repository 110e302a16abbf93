"""Evaluation: systems on held-out questions, baselines, significance, TREC files, summary and report."""
