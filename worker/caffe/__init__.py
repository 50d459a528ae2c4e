"""Caffe networks and solvers: prototxt in, gradients out.

`net.Description` describes a network, `model.CaffeModel` runs it, `solver.read_solver` reads how to
train it, and `weights` converts weights to and from .caffemodel files.
"""
