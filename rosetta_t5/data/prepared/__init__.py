"""Text that is tokenized once, before training, into shards of tokens.

`prepare` (the command `rosetta-t5 prepare`) writes the shards. `PreparedTask` makes batches of them in
numpy, each a function of the step.
"""

from rosetta_t5.data.prepared.prepare import prepare
from rosetta_t5.data.prepared.shards import TokenStream
from rosetta_t5.data.prepared.task import PreparedTask, prepared_task
