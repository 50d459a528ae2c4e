"""Examples: Caffe solvers and nets, and programs; `worker.ml` and its tasks import them by name."""
