"""One of several workers that train a small CNN on MNIST, in PyTorch: JOB.json NUMBER OF."""

import gzip
import sys
from pathlib import Path

import torch
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import ps

MNIST = Path(__file__).parents[1] / "demo" / "mnist"


def read(name: str, header: int) -> bytearray:
    return bytearray(gzip.decompress((MNIST / name).read_bytes())[header:])


model = Sequential(*(Conv2d(1, 8, 5, 2), ReLU(), MaxPool2d(2), Flatten(), Linear(288, 10)))

if __name__ == "__main__":
    number, of = int(sys.argv[2]), int(sys.argv[3])
    pixels = read("train-images-idx3-ubyte.gz", 16)
    images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 1, 28, 28)[number::of] / 255
    digits = read("train-labels-idx1-ubyte.gz", 8)
    labels = torch.frombuffer(digits, dtype=torch.uint8)[number::of].long()
    job = ps.connect(sys.argv[1], tables=dict(model.named_parameters()))
    with job.worker(f"w{number}", prefetch=1) as me:
        for begin in range(0, 256 * 64, 64):
            with me.step(samples=64) as step:
                model.load_state_dict(step.pull())
                loss = cross_entropy(model(images[begin : begin + 64]), labels[begin : begin + 64])
                model.zero_grad()
                loss.backward()
                step.push({name: weight.grad for name, weight in model.named_parameters()})
                step.loss = loss.item()
