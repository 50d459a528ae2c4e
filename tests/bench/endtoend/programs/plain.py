"""One PyTorch process with all cores."""

import torch
from torch.utils.data import DataLoader

from tests.bench.endtoend.programs.task import read_task
from tests.bench.endtoend.programs.torch_nets import Record, Worker, make_net, read_training_set


def main() -> None:
    task = read_task()
    model = make_net(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=task.momentum)
    batches = DataLoader(read_training_set(task), task.batch, shuffle=True)
    record, me = Record(task, task.batch), Worker(task, 0)
    while True:
        for images, labels in batches:
            optimizer.zero_grad()
            me.gradient(model, images, labels)
            optimizer.step()
            if record.take_step(model):
                return


if __name__ == "__main__":
    main()
