"""Training policies on a run's samples: SFT, DPO and IPO, through TRL.

`leret.training.stage.train` is the whole stage. The rest, in the order in which it goes through them: `examples` reads
what the run has, `initial` finds the weights to start from, `tokens` turns text into the ids that the sampler would
have produced, `sft` and `preference` build TRL's trainers from `arguments`, `preflight` refuses what would be trained
wrongly in silence, `watch` follows and stops it, `checkpoints` and `record` make it go on and end.
"""
