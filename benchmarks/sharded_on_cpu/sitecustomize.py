"""Patch accelerate to shard CPU processes with FSDP or DeepSpeed, like GPUs. Put this directory on PYTHONPATH.

accelerate reads these parts of a configuration only for accelerators, and silently uses data parallelism for CPU
processes. Each process reports on stderr that it is sharded.
"""

import os
import sys

FSDP, DEEPSPEED = (os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED"))

if FSDP or DEEPSPEED:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    of_process, of_training = PartialState.__init__, AcceleratorState.__init__

    def process(self, cpu=False, **more):
        of_process(self, **more)

    def training(self, mixed_precision=None, cpu=False, fsdp_plugin=None, **more):
        of_training(self, mixed_precision, cpu and FSDP, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        print(f"sharded by {self.distributed_type}", file=sys.stderr, flush=True)

    AcceleratorState.__init__ = training
    if DEEPSPEED:
        PartialState.__init__ = process
        PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_CPU)
