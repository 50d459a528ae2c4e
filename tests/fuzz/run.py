"""The fuzzers for as long as one likes: `make check C=fuzz`, or

    python -m tests.fuzz.run [--messages 1000000] [--rows 100000] [--connections 100000]
        [--files 20000] [--flips 100000] [--seed N]

Each prints what it did, and the first that finds something raises with the seed that repeats it.
A message goes through a dozen decoders, and is counted once.
"""

import argparse
import secrets
import time

from tests.fuzz import files, flips, live, targets, unfinished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--flips", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    started = time.monotonic()
    tally = targets.run(given.messages, given.seed)
    print(
        f"{tally.tried} messages, {tally.heard} of them understood, 0 crashes,"
        f" {time.monotonic() - started:.0f} s",
        flush=True,
    )
    tally = targets.run_rows(given.rows, given.seed)
    print(f"{tally.tried} pushes of rows, {tally.heard} of them applied, 0 crashes", flush=True)
    tried, read = files.run(given.files, given.seed)
    print(f"{tried} files, {read} of them could be read all the same, 0 crashes", flush=True)
    tallies = flips.run(given.flips, given.seed)
    for kind, one in tallies.items():
        harmless = one.tried - one.noticed
        print(f"{kind}: {one.tried} bits flipped, {one.noticed} noticed, {harmless} harmless")
    print(f"{sum(one.tried for one in tallies.values())} bits flipped, 0 unnoticed", flush=True)
    for secure in (False, True):
        found = live.run(given.connections // 2, given.seed, secure=secure)
        how = "over CURVE" if secure else "in plain text"
        print(
            f"{found.connections} hostile connections {how}, {found.updates} updates of a good"
            f" client meanwhile, RSS {found.growth_bytes / 2**20:+.1f} MB, {found.seconds:.0f} s",
            flush=True,
        )
    unfinished.main()


if __name__ == "__main__":
    main()
