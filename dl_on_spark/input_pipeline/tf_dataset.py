"""Batches as a `tf.data.Dataset`, at next to no cost per batch.

Blocks of many equal steps, arrays (steps, rows, \\*shape), cross from Python to TensorFlow at once;
`unbatch` then splits them into steps in C++, in order. A step of another size is a block of its
own. Dataset options keep TensorFlow's thread pools from competing with the training step: on one
core they halved the cost of a small step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dl_on_spark.input_pipeline.plan import Cursor
from dl_on_spark.input_pipeline.preprocess import Columns, Preprocessor
from dl_on_spark.input_pipeline.reader import RankReader

if TYPE_CHECKING:
    import tensorflow as tf

_BLOCKS_AHEAD = 2


def to_tf_dataset(
    reader: RankReader, next_cursor: Callable[[], Cursor], *, cardinality: int | None = None
) -> tf.data.Dataset:
    """Whole batches ``(x, y)`` or ``(x, y, weights)`` of the reader; ``x`` if there is no label.

    ``x`` is a dict of features by name. Each fresh iterator (one epoch of Keras's `fit`) asks
    ``next_cursor`` where to begin and yields that epoch's remaining batches. The batch dimension is
    None in ``element_spec``. ``cardinality``: how many batches each iterator yields, where that is known:
    Keras then counts an epoch's steps right. An exception in the reader is kept in ``reader.failure``.
    """

    def blocks() -> Iterator[Columns]:
        cursor = next_cursor()
        return reader.blocks(cursor.epoch, cursor.step)

    return dataset_of_blocks(blocks, reader.preprocessor, cardinality)


def dataset_of_blocks(
    blocks: Callable[[], Iterator[Columns]], preprocessor: Preprocessor, cardinality: int | None = None
) -> tf.data.Dataset:
    """A dataset whose fresh iterators call ``blocks`` and split each block into its steps."""
    import tensorflow as tf

    specs = {
        name: tf.TensorSpec((None, None, *shape), tf.as_dtype(dtype), name=name)
        for name, (shape, dtype) in preprocessor.tensor_specs().items()
    }

    def elements() -> Iterator[Any]:
        for block in blocks():
            yield preprocessor.element(block)

    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.deterministic = True
    dataset = tf.data.Dataset.from_generator(elements, output_signature=preprocessor.element(specs))
    dataset = dataset.prefetch(_BLOCKS_AHEAD).unbatch()
    if cardinality is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(cardinality))
    return dataset.with_options(options)
