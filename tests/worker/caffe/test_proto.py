"""caffe_pb2 is what protoc makes of caffe.proto, and its field numbers are Caffe's."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.message import Message

from worker.caffe import caffe_pb2

FOLDER = Path(caffe_pb2.__file__).parent


def test_the_generated_files_are_up_to_date(tmp_path: Path) -> None:
    """After a change to caffe.proto:

    cd worker/caffe && python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. caffe.proto
    """
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "caffe.proto"]
    subprocess.run(command, check=True)
    for name in ("caffe_pb2.py", "caffe_pb2.pyi"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), name


# Facts of the format, written down apart from caffe.proto.
NUMBERS: dict[type[Message], dict[str, int]] = {
    caffe_pb2.BlobProto: {"num": 1, "channels": 2, "height": 3, "width": 4, "data": 5, "diff": 6}
    | {"shape": 7, "double_data": 8, "double_diff": 9},
    caffe_pb2.BlobShape: {"dim": 1},
    caffe_pb2.Datum: {"channels": 1, "height": 2, "width": 3, "data": 4, "label": 5}
    | {"float_data": 6, "encoded": 7},
    caffe_pb2.NetParameter: {"name": 1, "layers": 2, "input": 3, "input_dim": 4}
    | {"force_backward": 5, "state": 6, "debug_info": 7, "input_shape": 8, "layer": 100},
    caffe_pb2.LayerParameter: {"name": 1, "type": 2, "bottom": 3, "top": 4, "loss_weight": 5}
    | {"param": 6, "blobs": 7, "include": 8, "exclude": 9, "phase": 10, "propagate_down": 11}
    | {"source_class": 10001, "cos_data_param": 10010},
    caffe_pb2.V1LayerParameter: {"bottom": 2, "top": 3, "name": 4, "type": 5, "blobs": 6}
    | {"blobs_lr": 7, "weight_decay": 8, "include": 32},
    caffe_pb2.SolverState: {"iter": 1, "learned_net": 2, "history": 3, "current_step": 4},
    caffe_pb2.MemoryDataParameter: {"share_in_parallel": 10000, "source": 10001}
    | {"dataframe_column_select": 10002, "image_encoded": 10003, "dataframe_format": 10004},
    caffe_pb2.ConvolutionParameter: {"dilation": 18},
    caffe_pb2.PoolingParameter: {"round_mode": 13},
}


@pytest.mark.parametrize("message", list(NUMBERS), ids=lambda message: message.DESCRIPTOR.name)
def test_field_numbers_are_caffes(message: type[Message]) -> None:
    """The numbers that files are made of, and blobs packed as Caffe packs them."""
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: fields[name].number for name in NUMBERS[message]} == NUMBERS[message]


def test_every_layer_setting_stands_above_field_100() -> None:
    """The `*_param` messages of a layer have numbers from 100 up, none twice."""
    numbers = [
        field.number
        for field in caffe_pb2.LayerParameter.DESCRIPTOR.fields
        if field.name.endswith("_param")
    ]
    assert sorted(set(numbers)) == sorted(numbers)
    assert set(range(100, 149)) <= set(numbers)
