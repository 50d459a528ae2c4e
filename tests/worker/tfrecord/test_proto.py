"""example_pb2 is what protoc makes of example.proto."""

import subprocess
import sys
from pathlib import Path

import pytest

from worker.tfrecord import example_pb2

FOLDER = Path(example_pb2.__file__).parent


def test_the_generated_files_are_up_to_date(tmp_path: Path) -> None:
    """After a change to example.proto:

    cd worker/tfrecord && python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. example.proto
    """
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "example.proto"]
    subprocess.run(command, check=True)
    for name in ("example_pb2.py", "example_pb2.pyi"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), name
