"""Build a small policy for a recipe's corpus from MiniLM: ``python -m models pretrain``."""
