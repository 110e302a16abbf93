"""A user's reward, in a module that can be imported."""


def found(outcome):
    return len(outcome.ranking)
