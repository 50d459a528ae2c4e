"""Checks that take longer than a test may: faults, hostile input, random runs."""

from tests.programs.table import Commands, Programs, downpour, module, register

CHECKS: Programs = {}


@register(CHECKS, "simulate", duration="2 minutes")
def simulate(seeds: str = "5000") -> Commands:
    """Play simulated clusters under faults, one for each seed."""
    yield downpour("simulate", "--seeds", seeds)


@register(CHECKS, "mutants", duration="minutes")
def detect_mutants() -> Commands:
    """Plant each known bug in the code: the simulator must detect it."""
    yield module("tests.mutants", "--all")


@register(CHECKS, "plants", duration="minutes")
def plant_kernel_defects() -> Commands:
    """Plant two defects in every CUDA kernel: the kernel's cases must find them."""
    yield module("tests.support.kernel_plants")


@register(CHECKS, "chaos", duration="SECONDS, or until KILLS")
def break_processes(
    seconds: str = "600",
    kills: str = "",
    seed: str = "1",
    level: str = "memory",
    burst: str = "",
    window: str = "",
    quorum: str = "",
    curve: str = "",
) -> Commands:
    """Break real processes and links by a seeded schedule, and judge every read and the weights.

    KILLS=300 kills only, and ends after so many; BURST and WINDOW are pushes of a worker for each
    read and steps for each push on two tables; QUORUM=2 merges reports on two fragments by so many;
    CURVE=1 encrypts.
    """
    ends = {"kinds": "kills", "kills": kills, "seconds": "86400"} if kills else {"seconds": seconds}
    options = {"seed": seed, "level": level, "burst": burst, "window": window, "quorum": quorum}
    bound = {"floats": "131072"} if quorum else {"bound": "4"}
    switches = ["--tour", *(["--curve"] if curve else [])]
    yield module("tests.chaos.run", *switches, **bound, **options, **ends)


@register(CHECKS, "cuts", duration="SECONDS")
def cut_links(seconds: str = "300", seed: str = "1") -> Commands:
    """Cut links for 3 to 10 s, again and again: how soon they are of use again."""
    workers = {"workers": "2", "linked": "2", "rest_ms": "10", "retry_s": "1"}
    faults = {"kinds": "cuts", "shortest_s": "3", "seconds": seconds, "seed": seed}
    yield module("tests.chaos.run", **faults, **workers)


@register(CHECKS, "soak", duration="SECONDS")
def soak(seconds: str = "3600", seed: str = "1", level: str = "memory") -> Commands:
    """Cause a fault every 2 s, and print by how many MB an hour shards and workers grow."""
    yield module("tests.chaos.run", "--soak", seconds=seconds, seed=seed, level=level)


@register(CHECKS, "nodes", duration="minutes")
def kill_nodes() -> Commands:
    """Kill all processes of a Ray node, twice, and see what copies and logs do."""
    yield module("tests.chaos.nodes")


@register(CHECKS, "executors", duration="2 minutes")
def kill_executors() -> Commands:
    """Add, kill and remove Spark's executors while they train; every row counts once an epoch."""
    yield module("tests.chaos.executors")


@register(CHECKS, "drain", duration="RUNS times half a minute")
def end_runs(runs: str = "50", seed: str = "1", states: str = "", reshard: str = "") -> Commands:
    """End runs by SIGTERM: no acknowledged push is missing in their snapshots, left within 20 s.

    STATES=1 is for workers that keep states, which the snapshots must have, too. With RESHARD=1 the
    shards change before they end, or as they do.
    """
    flags = [*(["--states"] if states else []), *(["--reshard"] if reshard else [])]
    yield module("tests.chaos.drain", *flags, runs=runs, seed=seed)


@register(CHECKS, "fuzz", duration="minutes")
def fuzz_shards() -> Commands:
    """Send hostile messages, frames and connections, and flip 100,000 bits in files."""
    yield module("tests.fuzz.run")


@register(CHECKS, "fuzz-service", duration="a minute", extras=("fuzz",))
def fuzz_service() -> Commands:
    """Send generated requests to every operation of the service."""
    yield module("tests.fuzz.service_api")
    yield module("tests.fuzz.service_values")


@register(CHECKS, "service-model", duration="half an hour")
def play_service_model(runs: str = "10000", seed: str = "1") -> Commands:
    """Play users, runners and crashes of the service at random."""
    yield module("tests.fuzz.service_model", runs=runs, seed=seed)


@register(CHECKS, "service-kills", duration="minutes")
def kill_service(kills: str = "20", seed: str = "1") -> Commands:
    """Kill service, runners, Ray, Spark, shards and workers while two jobs train."""
    yield module("tests.bench.service_kills", kills=kills, seed=seed)


@register(CHECKS, "service-upgrade", duration="minutes")
def upgrade_service(jobs: str = "10") -> Commands:
    """Replace the service by the next release while JOBS train: none may stop."""
    yield module("tests.bench.service_upgrade", jobs=jobs)


@register(CHECKS, "service-stopped", duration="SECONDS")
def stop_runner(seconds: str = "600") -> Commands:
    """Stop a job's runner with SIGSTOP: an alert, and nothing else."""
    yield module("tests.bench.service_stopped", seconds=seconds)


@register(CHECKS, "service-soak", duration="SECONDS")
def soak_service(seconds: str = "3600") -> Commands:
    """Print the service's memory while jobs train and viewers watch."""
    yield module("tests.bench.service_soak", seconds=seconds)


@register(CHECKS, "sweep-kills", duration="minutes")
def kill_sweeps(kills: str = "50", seed: str = "1") -> Commands:
    """Kill a sweep of 500 trials again and again; its files must be those of an unbroken one."""
    yield module("tests.bench.sweep_kills", kills=kills, seed=seed)


@register(CHECKS, "repeat", duration="RUNS times the suite")
def repeat_suite(out: str = "", runs: str = "20", busy: str = "") -> Commands:
    """Run `make test` in fresh clones, one after another; append a line for each run to OUT.

    BUSY=1 keeps every core busy meanwhile.
    """
    switches = ["--busy"] if busy else []
    yield module("tests.support.repeat_suite", *switches, out=out, runs=runs)


@register(CHECKS, "cluster", duration="5 minutes a case")
def train_on_hosts(
    cases: str = "routed-plain routed-guarded unrouted-plain unrouted-guarded", steps: str = "60"
) -> Commands:
    """Train LeNet by spark-submit from a packed archive, on three hosts in namespaces; needs root.

    Spark's master and workers, and Ray's head and nodes, see no checkout and no Python of the
    system. CASES are with a default route or without one, and in plain text or guarded, where a
    stranger on a fourth host must reach nothing. Each ends with a resume on this machine alone,
    from the snapshots.
    """
    yield module("tests.bench.packed_cluster", "--cases", *cases.split(), steps=steps)


@register(CHECKS, "two-hosts", duration="ROUNDS times 5 minutes")
def compare_hosts(rounds: str = "3", steps: str = "400") -> Commands:
    """Train LeNet on one host and on two with the same cores, in namespaces; needs root."""
    yield module("tests.bench.two_hosts", rounds=rounds, steps=steps)


@register(CHECKS, "images", duration="10 minutes")
def build_images(targets: str = "service executor", certificates: str = "") -> Commands:
    """Build the images of deploy/targets with podman, and try each; needs root.

    CERTIFICATES are files of authorities that the registries of packages are reached through.
    """
    words = ["--targets", *targets.split(), "--certificates", *certificates.split()]
    yield module("tests.bench.image_builds", *words)


@register(CHECKS, "compose", duration="20 minutes", extras=("compose",))
def run_compose(kills: str = "", store: str = "", certificates: str = "") -> Commands:
    """Run deploy/targets/compose with podman, train on it, kill each container; needs root.

    KILLS are some of its services. STORE is a folder where the images stay. CERTIFICATES are as for
    `images`.
    """
    words = ["--kills", *kills.split()] if kills else []
    words += ["--certificates", *certificates.split()]
    yield module("tests.bench.compose_stack", *words, store=store)


@register(CHECKS, "units", duration="10 minutes")
def run_units(store: str = "", certificates: str = "") -> Commands:
    """Run deploy/targets/units under systemd in containers, train, stop and kill; needs root.

    STORE and CERTIFICATES are as for `compose`.
    """
    words = ["--certificates", *certificates.split()]
    yield module("tests.bench.unit_hosts", *words, store=store)
