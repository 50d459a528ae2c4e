"""Caffe's layer types, one file a family; each file ends with its rows of the registry."""
