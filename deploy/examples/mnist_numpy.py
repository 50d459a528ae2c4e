"""One of several workers that train a small network on MNIST, in NumPy: JOB.json NUMBER OF."""

import gzip
import sys
from pathlib import Path

import numpy as np

import ps

MNIST = Path(__file__).parents[1] / "demo" / "mnist"


def read(name: str, header: int) -> bytearray:
    return bytearray(gzip.decompress((MNIST / name).read_bytes())[header:])


number, of = int(sys.argv[2]), int(sys.argv[3])
pixels = np.frombuffer(read("train-images-idx3-ubyte.gz", 16), np.uint8)
images = pixels.reshape(-1, 784)[number::of].astype(np.float32) / 255
labels = np.frombuffer(read("train-labels-idx1-ubyte.gz", 8), np.uint8)
targets = np.eye(10, dtype=np.float32)[labels[number::of]]

with ps.connect(sys.argv[1]).worker(f"w{number}", prefetch=1) as me:
    for begin in range(0, 256 * 64, 64):
        x, y = images[begin : begin + 64], targets[begin : begin + 64]
        with me.step(samples=len(x)) as step:
            p = step.pull()
            hidden = np.maximum(x @ p["w1"] + p["b1"], 0)
            scores = np.exp(hidden @ p["w2"] + p["b2"])
            chances = scores / scores.sum(axis=1, keepdims=True)
            step.loss = -np.log((chances * y).sum(axis=1)).mean()
            d2 = (chances - y) / len(x)
            d1 = d2 @ p["w2"].T * (hidden > 0)
            step.push({"w1": x.T @ d1, "b1": d1.sum(0), "w2": hidden.T @ d2, "b2": d2.sum(0)})
