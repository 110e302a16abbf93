"""Training policies on a run's samples, through TRL's trainers.

`stage.train` makes a `fit.TrainingJob` of a recipe and a run; `fit.fit` trains it: model and tokenizer (`model`), ids
as the sampler made them (`data`), refusals (`checks`), the algorithm's trainer (`algorithms`), checkpoints and the
finished directory (`checkpoints`).
"""
