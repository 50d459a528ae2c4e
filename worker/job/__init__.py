"""A training job, from its options to the trained weights: `train`, `run` and `stream`."""
