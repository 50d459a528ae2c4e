"""The data source `tfrecord` of Spark: `spark.dataSource.register(worker.TFRecord)`.

A second place that imports PySpark, as a data source is a class of PySpark's: Spark's Python
processes load this file by name.

Rows travel as Arrow batches both ways. A file is a partition, as records can only be found from a
file's start. Tasks write files under names of their own. The driver then removes what attempts that
did not count have left, and writes `_SUCCESS` last.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from ps.storage import open_store
from shards.errors import BadInput
from worker.tfrecord.columns import columns_of
from worker.tfrecord.files import (
    COMPRESSIONS,
    SUCCESS,
    find_files,
    read_batches,
    schema_of,
    write_file,
)

_SAMPLE = 1000
_OPTIONS = {"path", "paths", "sample", "compression"}


class TFRecord(DataSource):
    """TFRecord files of Examples or SequenceExamples, as Spark's data source `tfrecord`.

        spark.dataSource.register(worker.TFRecord)
        df = spark.read.format("tfrecord").load("data/train-*.tfrecord")
        df.write.format("tfrecord").mode("append").save("copy")

    `path` is a file, a folder or a name with `*`; a path or URI that all executors reach. Without a
    schema, one is inferred from `sample` records (1,000), as many of each file. Folders such as
    `day=2020-01-01` give a column `day`. A file compressed by gzip or zlib is recognised by its
    content; `compression`, `none` or `gzip`, is how files are written.

    Wrong files, records, types and options raise BadInput, which Spark quotes in its own error.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format: `tfrecord`."""
        return "tfrecord"

    def schema(self) -> StructType:
        """The inferred schema, which Spark asks for where none is given."""
        text = _options(self.options).get("sample", str(_SAMPLE))
        if not text.isdecimal() or not int(text):
            raise BadInput("tfrecord, option sample", expected="a number from 1", got=text)
        return from_arrow_schema(schema_of(self._files(), int(text)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of files as rows of `schema`, a file a partition."""
        return _RecordReader(self._files(), _arrow(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Make the writer of rows, a partition a file; `overwrite` removes earlier files."""
        options = _options(self.options)
        compression = options.get("compression", "none").lower()
        if compression not in COMPRESSIONS:
            raise BadInput(
                "tfrecord, option compression", expected=" or ".join(COMPRESSIONS), got=compression
            )
        arrow = _arrow(schema)
        columns_of(arrow)
        return _Writer(_path(options), arrow, compression, overwrite, token_hex(8))

    def _files(self) -> list[Any]:
        options = _options(self.options)
        paths = json.loads(options["paths"]) if "paths" in options else [_path(options)]
        return [file for path in paths for file in find_files(path)]


def _options(options: Mapping[str, str]) -> Mapping[str, str]:
    """The options by their lower-case names; raises BadInput for an unknown one."""
    known = {key.lower(): value for key, value in options.items()}
    if unknown := sorted(known.keys() - _OPTIONS):
        raise BadInput(
            "tfrecord", expected="the options sample and compression", got=", ".join(unknown)
        )
    return known


def _path(options: Mapping[str, str]) -> str:
    if "path" not in options:
        raise BadInput("tfrecord", expected="a path", got="none")
    return options["path"]


def _arrow(schema: StructType) -> Any:
    return to_arrow_schema(schema, timezone="UTC")


@dataclass
class _RecordReader(DataSourceReader):
    """Reads each file as one partition."""

    files: list[Any]
    schema: Any

    def __post_init__(self) -> None:
        stated = {name for file in self.files for name, _ in file.partition}
        columns_of([field for field in self.schema if field.name not in stated])

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(file) for file in self.files]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_batches(partition.value, self.schema)


@dataclass
class _Written(WriterCommitMessage):
    """The name of the file that a task wrote."""

    name: str


@dataclass
class _Writer(DataSourceArrowWriter):
    """Writes each partition as one file; `job` is in the names of all files of a write."""

    folder: str
    schema: Any
    compression: str
    overwrite: bool
    job: str

    def write(self, iterator: Iterator[Any]) -> _Written:
        task = TaskContext.get()
        assert task is not None, "a write runs inside a task"
        attempt = f"{task.partitionId():05}-{task.taskAttemptId()}"
        name = f"part-{attempt}-{self.job}{COMPRESSIONS[self.compression]}"
        write_file(self.folder, name, iterator, self.schema, self.compression)
        return _Written(name)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        committed = {message.name for message in messages if isinstance(message, _Written)}
        store = open_store(self.folder)
        for name in store.names():
            is_of_job = f"-{self.job}." in name
            earlier = self.overwrite and name.endswith(tuple(COMPRESSIONS.values()))
            if name not in committed and (is_of_job or earlier):
                store.remove(name)
        store.put(SUCCESS, [b""])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        store = open_store(self.folder)
        for name in store.names():
            if f"-{self.job}." in name:
                store.remove(name)
