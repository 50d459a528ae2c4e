"""The data that a net names, opened: the sources of its data layers."""

from pathlib import Path

from msgspec.structs import replace

from shards.errors import BadInput
from worker.caffe.net_data import NetData
from worker.data.image_table import ImageSource
from worker.data.parquet_columns import TableSource
from worker.data.read_options import MAX_SKIPPED, Split
from worker.data.source import Source
from worker.data.sources import open_with
from worker.data.zipped import LayerSource, ZippedSource


def open_net_data(
    data: NetData,
    path: Path | None = None,
    split: Split = "train",
    classes: int | None = None,
    seed: int | None = None,
    skip_images: int = MAX_SKIPPED,
) -> ImageSource:
    """A part of the data at `path`, or else of the source that a net names, as the net wants it.

    Labels outside [0, classes) are refused. A reader leaves out up to `skip_images` images. The
    sources of several layers are read in step. Raises BadInput that names the layer, if it named
    the source, and the file.
    """
    if data.others:
        if path is not None:
            names = " and ".join(source.layer for source in (data, *data.others))
            raise BadInput(
                f"data {path}", expected=f"no such data, as the net reads the sources of {names}"
            )
        members = list[LayerSource]()
        for part in (replace(data, others=()), *data.others):
            part_classes = (
                classes if len(part.tops) > 1 else None
            )  # without a top, labels are not read
            source = open_net_data(part, None, split, part_classes, seed, skip_images)
            if not isinstance(source, Source) or isinstance(source, TableSource):
                raise BadInput(
                    part.layer,
                    expected=(
                        "data of one of these formats, to be read in step with another "
                        "source: LMDB, LevelDB, HDF5, image list, image folder"
                    ),
                    got=part.source,
                )
            members.append(LayerSource(source, part.tops))
        return ZippedSource(members)
    options = replace(
        data.options, split=split, classes=classes, seed=seed or 0, max_skipped=skip_images
    )
    if path is not None:
        return open_with(path, options)
    if data.source is None:
        raise BadInput("expected a data layer that names a source, got none")
    if data.form not in {"", "parquet"}:
        raise BadInput(
            f"{data.layer}: dataframe_format",
            expected="parquet",
            got=f"{data.form}: read such files with Spark, and train on the DataFrame",
        )
    try:
        return open_with(data.source, options, data.kind)
    except BadInput as error:
        raise error.within(data.layer) from None
