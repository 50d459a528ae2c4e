"""TFRecord files of Examples and SequenceExamples, read and written without TensorFlow and a jar.

`framing` knows records and their checksums, `wire` and `decode` turn records into Arrow, `encode`
turns Arrow into records, `infer` finds a schema, `files` opens and writes files on any filesystem.
`source` is the data source that Spark loads; only it imports PySpark.
"""
