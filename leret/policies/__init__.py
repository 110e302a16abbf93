"""The LM behind a program: in this process, or behind OpenAI-compatible servers."""
