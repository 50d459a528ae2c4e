"""What a loss is divided by: Caffe's normalisation modes."""

from worker.caffe.caffe_pb2 import LossParameter


def mode_of(param: LossParameter, default: int) -> tuple[int, int | None]:
    """The mode and the ignored label, or None; the older field `normalize` counts, too."""
    ignored = param.ignore_label if param.HasField("ignore_label") else None
    if param.HasField("normalization"):
        return param.normalization, ignored
    if param.HasField("normalize"):
        return (LossParameter.VALID if param.normalize else LossParameter.BATCH_SIZE), ignored
    return default, ignored


def divisor(mode: int, whole: int, valid: int, batch: int) -> int:
    """The divisor, at least 1, for the numbers of all terms, of those that count, and of rows."""
    sizes: dict[int, int] = {
        LossParameter.FULL: whole,
        LossParameter.VALID: valid,
        LossParameter.BATCH_SIZE: batch,
    }
    return max(1, sizes.get(mode, 1))
