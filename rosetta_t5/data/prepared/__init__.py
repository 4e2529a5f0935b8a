"""Text prepared once: tokens in indexed shards, and a feed whose batches are functions of their step.

`prepare` writes them (the verb `rosetta-t5 prepare`), `PreparedTask` reads them. No TensorFlow.
"""

from rosetta_t5.data.prepared.prepare import prepare
from rosetta_t5.data.prepared.task import PreparedTask, prepared_task
from rosetta_t5.data.prepared.token_stream import TokenStream
