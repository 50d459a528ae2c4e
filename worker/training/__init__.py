"""One worker's training loop: the step machine, its driver, models and devices."""
