"""The divisor of a loss: Caffe's normalisation modes."""

from worker.caffe.caffe_pb2 import LossParameter


def mode_of(param: LossParameter, default: int) -> tuple[int, int | None]:
    """The mode and the ignored label, or None; the older field `normalize` counts, too."""
    ignored = param.ignore_label if param.HasField("ignore_label") else None
    if param.HasField("normalization"):
        return param.normalization, ignored
    if param.HasField("normalize"):
        return (LossParameter.VALID if param.normalize else LossParameter.BATCH_SIZE), ignored
    return default, ignored


def divisor(mode: int, whole: int, batch: int) -> int | None:
    """The divisor, from the numbers of terms and rows; None: the number of terms not ignored."""
    sizes: dict[int, int | None] = {
        LossParameter.FULL: whole,
        LossParameter.VALID: None,
        LossParameter.BATCH_SIZE: batch,
    }
    return sizes.get(mode, 1)
