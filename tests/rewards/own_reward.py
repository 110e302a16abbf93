def found(outcome):
    return len(outcome.ranking)
