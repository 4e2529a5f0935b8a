"""T5X's `checkpoint_importer`: lazily read T5 checkpoints of Mesh TensorFlow, under T5X's names."""

from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray, LazyThreadPoolArray
from rosetta_t5.checkpoints.arrays.parameter_trees import (
  rename_shared_biases as _maybe_correct_relpos_bias,
)
from rosetta_t5.checkpoints.formats.mesh_tf import (
  CheckpointTranslator,
  attention_layers,
  final_layernorms,
  final_logits,
  global_step,
  layernorms,
  load_tf_ckpt,
  mlpblock,
  rel_embeddings,
  separate_embeddings,
  shared_embeddings,
  t5_importer,
)
from rosetta_t5.compat.checkpoints.checkpoint_loading import (
  LazyAwaitableArray,
  restore_from_t5_checkpoint,
)
