"""Text that is tokenized once: indexed shards of tokens, and batches that are functions of the step.

`prepare` (the command `rosetta-t5 prepare`) writes the shards, and `PreparedTask` reads them. Neither
needs TensorFlow.
"""

from rosetta_t5.data.prepared.prepare import prepare
from rosetta_t5.data.prepared.task import PreparedTask, prepared_task
from rosetta_t5.data.prepared.token_stream import TokenStream
