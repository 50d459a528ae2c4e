"""`downpour data`: inspect data, convert it to another format, compute its mean."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shards.errors import BadInput
from shards.plurals import format_count
from worker.data.read_options import MAX_SKIPPED
from worker.job.option_fields import list_options
from worker.job.options import TrainingPlan

if TYPE_CHECKING:
    from worker.data.read_options import ReadOptions, Split

app = typer.Typer(
    help="Look at data, convert it, compute its mean.", no_args_is_help=True, add_completion=False
)

Data = Annotated[
    Path,
    typer.Argument(
        help="IDX or Parquet files, an LMDB or LevelDB, an image list, or a folder of images.",
        show_default=False,
    ),
]
Part = Annotated[str, typer.Option(help="Which part of divided data: train or test.")]
Resize = Annotated[
    str | None,
    typer.Option(help="The size of all images, HEIGHTxWIDTH.", show_default="as they are"),
]
_SKIP = list_options(TrainingPlan)["skip_images"].option
Skip = Annotated[int, typer.Option("--skip-images", min=0, help=_SKIP.text)]


@app.command()
def inspect(
    data: Data,
    split: Part = "train",
    sheet: Annotated[
        Path | None,
        typer.Option(help="A picture to write, with images of each label.", show_default=False),
    ] = None,
    resize: Resize = None,
    skip: Skip = MAX_SKIPPED,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read all rows; print their number, their shape, statistics and a histogram of labels."""
    from deploy.run.data_tools import inspect as inspected

    inspection = inspected(data, _read_options(split, resize, skip), sheet)
    typer.echo(inspection.json() if as_json else inspection.text())


@app.command()
def convert(
    data: Data,
    out: Annotated[Path, typer.Argument(help="The file or folder to make.", show_default=False)],
    to: Annotated[
        str, typer.Option(help="The format: lmdb, parquet, idx or folder.", show_default=False)
    ],
    split: Part = "train",
    resize: Resize = None,
    skip: Skip = MAX_SKIPPED,
) -> None:
    """Write data in another format. Colour images keep Caffe's order of channels, BGR."""
    from deploy.run.data_tools import convert as converted

    rows = converted(data, out, to, _read_options(split, resize, skip))
    typer.echo(f"{format_count(rows, 'row')} in {out}")


@app.command()
def mean(
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(help="The mean image to write, a .binaryproto file.", show_default=False),
    ] = None,
    split: Part = "train",
    resize: Resize = None,
    skip: Skip = MAX_SKIPPED,
) -> None:
    """Print the mean of each channel, as lines for `transform_param`."""
    from deploy.run.data_tools import mean_of

    for value in mean_of(data, out, _read_options(split, resize, skip)):
        typer.echo(f"mean_value: {value:.6g}")


def _part(name: str) -> "Split":
    match name:
        case "train" | "test":
            return name
    raise BadInput("--split", expected="train or test", got=name)


def _read_options(split: str, resize: str | None, skip: int) -> "ReadOptions":
    from worker.data.read_options import ReadOptions

    if resize is None:
        return ReadOptions(_part(split), max_skipped=skip)
    height, _, width = resize.partition("x")
    if not height.isdecimal() or not width.isdecimal() or not 0 < int(height) * int(width) < 2**26:
        raise BadInput("--resize", expected="HEIGHTxWIDTH, such as 256x256", got=resize)
    return ReadOptions(_part(split), resize=(int(height), int(width)), max_skipped=skip)
