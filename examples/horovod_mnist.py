"""horovod_mnist.py: a Horovod script as it was written in 2019, with scikit-learn's digits for MNIST's.

horovodrun -np 2 python examples/horovod_mnist.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.dropout = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.dropout(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_dataset = TensorDataset(images[:1500], labels[:1500])
test_dataset = TensorDataset(images[1500:], labels[1500:])

# Every process sees its own part of the data.
train_sampler: DistributedSampler[int] = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
test_sampler: DistributedSampler[int] = DistributedSampler(
    test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
test_loader = DataLoader(test_dataset, batch_size=args.batch_size, sampler=test_sampler)

model = Net()

# A larger batch in all, so a larger rate; Adasum needs no such scaling.
lr_scaler = 1 if args.use_adasum else hvd.size()
optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)

# Everybody begins with the same weights and the same optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)


def train(epoch: int) -> None:
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")


def metric_average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


def test() -> None:
    model.eval()
    loss, accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            accuracy += (output.argmax(1) == target).float().sum().item()
    loss = metric_average(loss / len(test_sampler), "avg_loss")
    accuracy = metric_average(accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test: loss {loss:.4f}, accuracy {accuracy:.1%} with {hvd.size()} processes")


for epoch in range(1, args.epochs + 1):
    train(epoch)
test()
