"""Treatment of each field of a solver file: no field is silently ignored.

Every field of `SolverParameter` is in exactly one of the two tables. docs/reference/solver.md
shows them to users. A test compares the tables with the protobuf message and with that page.
"""

from worker.caffe.caffe_pb2 import SolverParameter

HONOURED = {
    "net": "The net, for training and for tests.",
    "net_param": "The same, written inside the solver file.",
    "train_net": "The net for training.",
    "train_net_param": "The same, written inside the solver file.",
    "test_net": "A net for tests. Each needs a `test_iter`.",
    "test_net_param": "The same, written inside the solver file.",
    "train_state": "Level and stages of the net for training.",
    "test_state": "Level and stages of each net for tests.",
    "test_iter": "Batches in one test during training, from the start of the test data. 0: training"
    " does not test with this net.",
    "test_interval": "Iterations between two tests during training. 0: no such tests.",
    "test_initialization": "Whether the initial weights are tested, too.",
    "base_lr": "The learning rate that `lr_policy` scales. It must be more than 0.",
    "lr_policy": "`fixed` (the default), `step`, `exp`, `inv`, `multistep`, `poly` or `sigmoid`.",
    "gamma": "For `step`, `exp`, `inv`, `multistep` and `sigmoid`.",
    "power": "For `inv` and `poly`.",
    "stepsize": "For `step` and `sigmoid`.",
    "stepvalue": "For `multistep`.",
    "max_iter": "Steps of each worker, unless `--max-iter` says otherwise. Only training needs it.",
    "iter_size": "Number of batches with gradients that are summed for one step.",
    "type": "`SGD`, `Nesterov`, `AdaGrad`, `RMSProp`, `AdaDelta` or `Adam`.",
    "solver_type": "The older form of `type`. It counts where `type` is not set.",
    "momentum": "For `SGD`, `Nesterov`, `AdaDelta` and `Adam`. Other types refuse it.",
    "momentum2": "For `Adam`.",
    "rms_decay": "For `RMSProp`.",
    "delta": "For `AdaGrad`, `RMSProp`, `AdaDelta` and `Adam`.",
    "weight_decay": "The strength of the regularisation.",
    "regularization_type": "`L2` or `L1`.",
    "clip_gradients": "The largest L2 norm of a gradient. A longer gradient is scaled down to it.",
    "weights": "Files to start from, unless `--weights` names one or a snapshot is resumed.",
    "random_seed": "The seed of initial weights and of shuffling, unless `--seed` is given.",
    "display": "Iterations between two lines about the loss, in a pipe or a log.",
    "average_loss": "Iterations over which the displayed loss is averaged. Without it the display"
    " takes ten seconds.",
    "snapshot": "Iterations between two snapshots, unless `--snapshot-every` says otherwise.",
    "snapshot_after_train": "`false`: a run that ends by itself takes no last snapshot.",
    "solver_mode": "`CPU`: workers compute on the CPU, unless `--device` says otherwise. `GPU`: as"
    " `--device auto`.",
}
"""Fields that have the same effect as in Caffe, with a description."""

NOTED = {
    "snapshot_prefix": "snapshots go into the run folder, or where `--snapshots` says",
    "snapshot_format": "snapshots have a format of their own; `downpour convert` writes HDF5",
    "device_id": "`--device gpu:N` chooses a GPU",
    "test_compute_loss": "a test reports every loss of its net in any case",
    "debug_info": "nothing more is logged than without it",
    "layer_wise_reduce": "workers exchange gradients with the shards, not with each other",
    "snapshot_diff": "snapshots hold no gradients",
}
"""Fields that have no effect here. A solver that sets one is accepted, and a notice says why."""


def notices(param: SolverParameter, file: str) -> list[str]:
    """One line for each field that has no effect and is not at its default."""
    return [
        f"{file}: {field.name} has no effect: {NOTED[field.name].replace('`', '')}"
        for field, value in param.ListFields()
        if field.name in NOTED and value != field.default_value
    ]
