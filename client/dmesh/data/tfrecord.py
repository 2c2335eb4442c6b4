"""`TFRecordDataset`: TFRecord files, under TensorFlow's name."""

from __future__ import annotations

from dmesh.data.dataset import Dataset
from dmesh.data.files import Files

__all__ = ["TFRecordDataset"]


class TFRecordDataset(Dataset):
    """Dataset of the records of TFRecord files, as arrays of bytes; `Dataset.from_tfrecord` reads examples.

    ```python
    images = dmesh.data.TFRecordDataset("images-*.tfrecord").map(
        lambda record: dmesh.data.parse_single_example(record, features)
    )
    ```

    Args:
        filenames: A path, a pattern, several of them, or a dataset of them, which is read at once.
        compression_type: GZIP or ZLIB; None or empty for none.
        buffer_size: Ignored: the operating system reads ahead.
        num_parallel_reads: Ignored: files are read one after the other.
        name: Ignored.

    Raises:
        DatasetError: A file does not exist, or the compression type is unknown.
    """

    def __init__(
        self,
        filenames: Files,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(Dataset.from_tfrecord(filenames, compression_type=compression_type)._node)
