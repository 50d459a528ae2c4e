"""Fields of layers with a sliding window: the image, and pairs of sizes."""

from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.ops.pooling.window import Pooling
from shards.errors import BadInput
from worker.caffe.caffe_pb2 import ConvolutionParameter, PoolingParameter
from worker.caffe.layer import Layer

Pair = tuple[int, int]


def misfit(layer: Layer, shape: Convolution | Pooling) -> BadInput:
    """An error about a window that the bottom is too small for, for the caller to raise."""
    sizes = ", ".join(
        f"{name} {size[0]}x{size[1]}"
        for name in ("kernel", "stride", "pad", "dilation")
        if (size := getattr(shape, name, None))
    )
    return layer.bad(f"{sizes}: does not fit a bottom of shape {layer.describe_bottom(0)}")


def image_of(layer: Layer) -> tuple[int, int, int, int]:
    shape = layer.bottoms[0]
    if len(shape) != 4:
        raise layer.bad(f"expected a bottom of shape (n, c, h, w), got {layer.describe_bottom(0)}")
    n, c, h, w = shape
    return n, c, h, w


def pair(
    layer: Layer,
    param: ConvolutionParameter | PoolingParameter,
    sided: str,
    plain: str,
    default: int | None,
) -> Pair:
    """(vertical, horizontal) from `sided`_h and `sided`_w, or from `plain`: one form, not both.

    As in Caffe, a convolution with only one of pad_h and pad_w has no pad in the other direction.
    """
    # A convolution's sizes are lists, of one entry for both directions or one for each.
    value = getattr(param, plain)
    values = list(value) if not isinstance(value, int) else [value] * param.HasField(plain)
    if plain == "pad" and isinstance(param, ConvolutionParameter) and not values:
        return param.pad_h, param.pad_w
    sides = [
        getattr(param, f"{sided}_{side}") for side in "hw" if param.HasField(f"{sided}_{side}")
    ]
    if sides:
        if len(sides) != 2 or values:
            raise layer.bad(f"expected {plain}, or both {sided}_h and {sided}_w")
        sizes = sides
    else:
        sizes = values or ([] if default is None else [default])
    least = 0 if plain == "pad" else 1
    if len(sizes) not in {1, 2} or min(sizes) < least:
        raise layer.bad(f"{plain}: expected 1 or 2 numbers of at least {least}, got {sizes}")
    return sizes[0], sizes[-1]
