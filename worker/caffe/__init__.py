"""Caffe networks and solvers: prototxt in, gradients out.

`net.Description` says what to build, `model.CaffeModel` runs it, `solver.read_solver` reads how to
train it, `weights` moves weights to and from .caffemodel files.
"""
