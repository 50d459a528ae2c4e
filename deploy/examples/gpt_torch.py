"""A small GPT on the characters of text, by learners of different speeds that never wait.

    python deploy/examples/gpt_torch.py                     three processes at speeds 1:2:6
    python deploy/examples/gpt_torch.py --link slow         each behind 100 ms and 10 Mbit/s
    python deploy/examples/gpt_torch.py --text docs deploy  each learner reads one of the folders
    python deploy/examples/gpt_torch.py --in-step           each waits for the others at each step
    python deploy/examples/gpt_torch.py --alone             the plain script, in this process
    python deploy/examples/gpt_torch.py --size 30M --device cuda

`train` is a plain PyTorch script, and `learn` the same as a learner of a job. `serve` starts the
shards, and prints the loss on text that no learner reads against tokens, seconds and bytes; with
`--out FOLDER` it is recorded, and `downpour plot FOLDER` draws it.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import GELU, Embedding, LayerNorm, Linear, Module, Parameter, Sequential
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import AdamW

import deploy
import ps
import worker
import worker.torch

DOCS = Path(__file__).parents[2] / "docs"
SUFFIXES = (".md", ".txt", ".py")
LETTERS, CONTEXT, BATCH, RATE = 256, 64, 8, 1e-3  # a letter is a byte of UTF-8
SIZES = {"small": (32, 2, 2), "1M": (128, 5, 4), "30M": (512, 10, 8), "100M": (768, 14, 12)}
"""Width, depth and heads; small has 36 thousand weights."""
SPEEDS = {"w0": 6, "w1": 2, "w2": 1}
FRAGMENTS = 5
HOW: dict[str, Any] = {
    "strategy": "decoupled_diloco:h=12,momentum=0.5,speeds="
    + "+".join(f"{name}/{speed}" for name, speed in SPEEDS.items()),
    "workers": len(SPEEDS),
}
LINKS: dict[str, dict[str, Any]] = {
    "none": {},
    "fast": {"link": "rtt=100ms,rate=1Gbit"},
    "slow": {
        "link": "rtt=100ms,rate=10Mbit",
        "compression": ps.Compression.parse("4bit", "int8"),
    },
}


class TransformerBlock(Module):  # type: ignore[misc]  # PyTorch is not checked
    """Causal attention and a hidden layer, each added to its normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attended, self.hidden = LayerNorm(width), LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.layers = Sequential(Linear(width, 4 * width), GELU(), Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        parts = self.qkv(self.attended(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.layers(self.hidden(x))


class GPT(Module):  # type: ignore[misc]  # PyTorch is not checked
    """The scores of each next letter, by a head that is tied to the embedding."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = Embedding(LETTERS, width)
        self.position = Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = LayerNorm(width)
        self.head = Linear(width, LETTERS, bias=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, letters: Any) -> Any:
        return self.head(self.norm(self.blocks(self.embedding(letters) + self.position)))


def make_model(size: str, device: str = "cpu") -> GPT:
    """A model of one of `SIZES`, with the same weights at each call."""
    model = GPT(*SIZES[size])
    model.to(device)
    return model


def loss_of(model: Any, rows: Any) -> Any:
    """The mean loss of guessing each next letter, in nats."""
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(model: Any, batches: Iterable[Any]) -> None:
    """Train in this process: a plain script."""
    optimizer = AdamW(model.parameters(), lr=RATE)
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def learn(model: Any, batches: Iterable[Any], job: ps.Job, name: str, **options: Any) -> None:
    """Train as a learner of a job: the same script."""
    optimizer = AdamW(model.parameters(), lr=RATE)
    with worker.torch.join(job, name, model, optimizer, **HOW, **options) as learner:
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            learner.step(loss=loss, samples=BATCH * CONTEXT)
            learner.zero_grad()


# --- text -----------------------------------------------------------------------------------------


def read_rows(path: Path) -> tuple[Any, Any]:
    """The text of a file, or of a folder's files, in rows of letters: those to train on, and a
    tenth that no learner reads.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    text = b"".join(file.read_bytes() for file in files if file.suffix in SUFFIXES)
    count = len(text) // (CONTEXT + 1)
    if count < 10 * BATCH:
        sys.exit(
            f"{path}: expected {10 * BATCH * (CONTEXT + 1)} letters of text or more in files"
            f" {', '.join(SUFFIXES)}, got {len(text)}"
        )
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = letters[: count * (CONTEXT + 1)].view(count, CONTEXT + 1)
    tested = torch.arange(count) % 10 == 0
    return rows[~tested], rows[tested]


def draw_batches(rows: Any, steps: int, seed: int, pace_s: float = 0.0) -> Iterator[Any]:
    """Batches of random rows; with a pace none comes sooner than that after the last one."""
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        due = time.monotonic() + pace_s
        yield rows[torch.randint(len(rows), (BATCH,), generator=dice)]
        time.sleep(max(0.0, due - time.monotonic()))


# --- processes ------------------------------------------------------------------------------------


def follow(job: ps.Job, model: Any, tested: Any, learners: list[Any], records: Any) -> float:
    """Print loss against tokens, seconds and bytes until all learners have ended; the last loss.

    `records` get it as well, unless they are None.
    """
    started = time.monotonic()
    print(f"{'tokens':>9} {'seconds':>8} {'MB pushed':>9} {'loss':>6} learners", flush=True)
    with ps.AdminClient(job.cluster) as admin:
        while True:
            ended = all(learner.poll() is not None for learner in learners)
            seconds, statuses = time.monotonic() - started, admin.status()
            active = sum(learner.standing == "active" for learner in statuses[0].workers)
            pushed = sum(status.bytes_in for status in statuses)
            with torch.no_grad():
                loss: float = loss_of(worker.torch.load(model, job.read()), tested).item()
            tokens = statuses[0].steps * BATCH * CONTEXT  # those of dropped reports as well
            print(
                f"{tokens:9,} {seconds:8.1f} {pushed / 1e6:9.1f} {loss:6.3f} {active:8}", flush=True
            )
            if records is not None:
                records.test({"loss": loss})
            if ended and not active:  # a learner that joined later has left, too
                return loss
            time.sleep(2)


def serve(options: argparse.Namespace) -> float:
    """Start the shards and a learner of each speed, and follow them; returns the last loss."""
    model = make_model(options.size, options.device)
    tested = torch.cat([read_rows(path)[1][:100] for path in options.text]).to(options.device)
    tables = worker.torch.fragments(model, 1 if options.in_step else FRAGMENTS)
    with (
        worker.start(tables, **HOW) as job,
        nullcontext() if options.out is None else deploy.record(job, options.out) as records,
    ):
        job.save(options.job)
        learners = [
            subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--learner", f"{number}"])
            for number in range(len(SPEEDS))
        ]
        for name, learner in zip(SPEEDS, learners, strict=True):
            print(f"{name} is process {learner.pid}", flush=True)
        try:
            return follow(job, model, tested, learners, records)
        finally:
            for learner in learners:
                learner.kill()


def run_learner(options: argparse.Namespace) -> None:
    """Learn at the speed of the learner's number; one without is as fast as the fastest."""
    number, name, fastest = options.learner, f"w{options.learner}", max(SPEEDS.values())
    slower = fastest / SPEEDS.get(name, fastest)
    rows, _ = read_rows(options.text[number % len(options.text)])
    steps = round(options.steps / slower)
    if options.in_step:  # together as many as those that never wait
        steps = round(options.steps * sum(SPEEDS.values()) / fastest / len(SPEEDS))
    batches = draw_batches(rows.to(options.device), steps, number, options.pace * slower)
    with ps.connect(options.job) as job:
        how = {**LINKS[options.link], "incarnation": options.incarnation}
        learn(make_model(options.size, options.device), batches, job, name, **how)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, nargs="+", default=[DOCS], help="files or folders")
    parser.add_argument("--steps", type=int, default=480, help="of the fastest learner")
    parser.add_argument("--pace", type=float, default=0.25, help="seconds of its steps")
    parser.add_argument("--link", choices=LINKS, default="none", help="of each learner")
    parser.add_argument("--size", choices=SIZES, default="1M", help="weights of the model")
    parser.add_argument("--device", default="cpu", help="of models and batches, such as cuda:0")
    parser.add_argument("--in-step", action="store_true", help="learners wait for each other")
    parser.add_argument("--out", type=Path, help="the folder to record the run in")
    parser.add_argument("--alone", action="store_true", help="train without shards")
    parser.add_argument("--job", type=Path, default=Path("job.json"), help="the job's file")
    parser.add_argument("--learner", type=int, help="be the learner of this number in the job")
    parser.add_argument("--incarnation", type=int, default=0, help="higher for a restarted one")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    if options.in_step:
        HOW["strategy"] = "local_sgd:h=1"
    if options.learner is not None:
        run_learner(options)
    elif options.alone:
        model, (rows, tested) = make_model(options.size, options.device), read_rows(options.text[0])
        train(model, draw_batches(rows.to(options.device), options.steps, 0))
        print(f"loss {loss_of(model, tested[:100].to(options.device)).item():.3f}")
    else:
        print(f"loss {serve(options):.3f}")


if __name__ == "__main__":
    main()
