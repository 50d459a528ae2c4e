"""Wrong arguments of every command, each with what its error must say: rows of (arguments, line).

The working directory holds tiny's job (`solver.prototxt`, `net.prototxt`, `data`), `broken`, which
is a .safetensors file that is none, `empty`, a folder, and `empty.json`. The first lines of `ROWS`
are products of options and values; the others are single cases.
"""

from collections.abc import Iterable

TRAIN = "train --solver solver.prototxt --data data --out run"
TEST = "test --solver solver.prototxt --weights broken.safetensors --data data"
FEATURES = "features --net net.prototxt --weights broken.safetensors --data data --blobs ip1"

Row = tuple[list[str], str]

NO_INTEGERS = ("abc", "1e9", "1.5", "nan", "inf", "0x10")
HUGE = "99999999999999999999"
TIME = "a time, as 30s, 5m, 12h or 7d"
NO_TIMES = ("abc", "-1", "5x", "1.5", "nans", "infs", "1e300s", "-5s", "0s", "s", "2000000000s")
CODECS = r"none, fp16, bf16, int8, 4bit, 1bit, topk:SHARE or threshold:TAU, and perhaps ,zstd"
PULLS = "none, fp16, bf16, int8, 4bit or topk:SHARE"
RUN = "expected a run folder or a place with snapshots, got none there"
SPARK = (
    r"expected spark://HOST:PORT, yarn, k8s://HOST:PORT, sc://HOST:PORT, submitted or local\[N\],"
)


def _each(option: str, values: Iterable[str], line: str, before: str = TRAIN) -> list[Row]:
    """The option with each value; `line` follows its name, and `{}` in it is the quoted value."""
    return [
        ([*before.split(), option, value], f"{option}{line}".replace("{}", _quoted(value)))
        for value in values
    ]


def _quoted(value: str) -> str:
    from re import escape

    return escape(repr(value))


def _line(arguments: str, line: str) -> Row:
    return arguments.split(), line


_COUNTS = ("--workers", "--shards", "--max-iter", "--n-push", "--n-fetch", "--snapshot-keep")

ROWS: list[Row] = [
    *(
        row
        for option in (*_COUNTS, "--warm-steps", "--seed", "--port")
        for row in _each(option, NO_INTEGERS, ": expected a whole number, got {}")
    ),
    *(
        row
        for option in _COUNTS
        for row in [
            *_each(option, ["0", "-1"], ": expected at least 1, got "),
            *_each(option, [HUGE], r": expected at most \d+, got 9"),
        ]
    ),
    *_each(
        "--advertise",
        [":7", "h:0", "0.0.0.0", "a b"],
        ": expected HOST or HOST:PORT, as other hosts reach it, got {}",
    ),
    *_each(
        "--copy-ports", ["7500", "9-8", "a-b"], ": expected a range of ports, as 7500-7599, got {}"
    ),
    *_each("--driver-host", ["h:1"], ": expected a host without a port, got {}"),
    *_each("--leave-s", ["0", "nan"], ": expected at least 1, got "),
    _line(
        f"{TRAIN} --driver-port 7600",
        "--driver-port 7600: expected --spark with a master, got none",
    ),
    _line(f"{TRAIN} --namespace x", "--namespace x: expected --ray, got none"),
    _line(
        f"{TRAIN} --coordinator-port 7390",
        "--coordinator-port 7390: expected --durability replicated",
    ),
    _line("deploy check --spark sc://h", "--spark sc://h: expected a master, such as spark://HOST"),
    _line("deploy check --spark hello", "--spark: expected spark://HOST:PORT, yarn, "),
    _line("deploy network --port 7450", "--copy-ports: expected ports apart from those of shards"),
    *_each("--warm-steps", ["-1"], ": expected at least 0, got -1"),
    *_each("--warm-steps", [HUGE], ": expected at most 2147483647, got 9"),
    *_each("--seed", [str(2**63), HUGE * 2], f": expected at most {2**63 - 1}, got 9"),
    *_each("--seed", [str(-(2**63) - 1)], f": expected at least {-(2**63)}, got -9"),
    *_each("--port", ["-1", "65536", HUGE], ": expected 0 to 65535, got "),
    *_each(
        "--staleness",
        ["abc", "-1", "1.5", "nan", "infinity", "²"],
        ": expected a whole number of steps or inf, got {}",
    ),
    *_each("--staleness", ["9" * 5000], ": expected a whole number of steps or inf, got '9{80}'"),
    *_each("--staleness", [HUGE, str(2**31)], ": expected at most 2147483647, got "),
    *(
        row
        for option in ("--lease-s", "--silence-s", "--rollback-s")
        for row in _each(option, ["abc", "1,5", "5s"], ": expected a number, got {}")
    ),
    *_each(
        "--lease-s",
        ["nan", "inf", "-1", "0", "1e300", "1e7"],
        ": expected more than 0 s, up to 604800, got ",
    ),
    *_each(
        "--silence-s",
        ["nan", "inf", "-1", "0", "1e300", "20"],
        r": expected (at least 0\.2|more than 0|at most [0-9]+) s.*, got ",
        f"{TRAIN} --shards-in processes --durability replicated",
    ),
    *_each("--rollback-s", ["nan", "-1"], ": expected at least 0, got "),
    *_each("--rollback-s", ["inf", "1e300"], ": expected at most 604800, got "),
    *_each("--bind", [" ", "::1", "127.0.0.1:80", "tcp://h"], ": expected an IPv4 address, got {}"),
    *_each(
        "--bind",
        ["xyz.invalid", "256.1.1.1", "192.0.2.1", "a b"],
        r": expected an IPv4 address of this machine, or 0\.0\.0\.0 for all, got {}",
    ),
    *_each(
        "--ray",
        ["foo", "foo:bar", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", ":1", "http://h:1"],
        ": expected HOST:PORT, ray://HOST:PORT or auto, got {}",
    ),
    *_each(
        "--spark",
        [
            *("foo", "local[0]", "local[x]", "local[999999]", "spark://", "spark://127.0.0.1"),
            *("spark://127.0.0.1:x", "spark://127.0.0.1:99999", "k8s://", "sc://"),
            *("http://127.0.0.1:1", "mesos://h:1"),
        ],
        f": {SPARK} got {{}}",
    ),
    *_each(
        "--transport", ["rdma", "TCP", "shm,tcp"], ": expected one of auto, tcp, ipc, shm, got {}"
    ),
    *_each(
        "--durability",
        ["disk", "Memory"],
        ": expected one of memory, process, logged, replicated, got {}",
    ),
    *_each("--shards-in", ["k8s", "Ray"], ": expected one of ray, processes, got {}"),
    *_each("--shard-device", ["cuda", "gpu:1"], ": expected one of cpu, gpu, got {}"),
    *_each("--precision", ["fp64", "int8"], ": expected one of fp32, tf32, bf16, got {}"),
    *_each("--strategy", ["down", "DOWNPOUR", "bsp "], ": expected one of adag, .*, got {}"),
    *(
        row
        for before in (TRAIN, TEST, f"{FEATURES} --output f")
        for row in _each(
            "--device",
            ["cuda", "gpu:", "gpu:x", "gpu:-1", "GPU"],
            ": expected auto, cpu, gpu or gpu:N, got {}",
            before,
        )
    ),
    *_each(
        "--link",
        ["rtt", "rtt=100", "rtt=-1ms", "rtt=nanms", "rtt=1e400ms", "jitter=1", "outage=1s"],
        ": expected a number with one of us, ms, s, got {}",
    ),
    *_each("--link", ["rate=0bit"], ": rate: expected more than 0 bit/s"),
    *_each("--link", ["loss=200%"], ": loss: expected less than 100 %"),
    *_each("--link", ["loss=nan"], ": expected a number with one of %, got 'loss=nan'"),
    *_each("--link", ["outage=5s/1s"], ": outage: expected LENGTH/EVERY, EVERY the longer"),
    *_each("--link", ["window=1B"], ": window: expected at least 64 KiB"),
    *_each("--link", [f"window={HUGE}GB"], ": window: expected at most 1024 GiB"),
    *_each("--link", [f"rtt={HUGE}s"], ": rtt: expected at most 3600 s"),
    *_each("--link", ["shape=x"], ": shape: expected one of uniform, normal, pareto, got 'x'"),
    *_each("--link", ["seed=x"], ": seed: expected a whole number, got 'x'"),
    *_each("--link", [f"seed={HUGE}"], r": seed: expected 0 to 2\^63 - 1"),
    *_each("--link", ["foo=1", "x"], ": expected rtt, jitter, shape, rate, .* or seed, got {}"),
    *_each(
        "--compress",
        ["int9", "topk", "zstd", "threshold", "INT8"],
        f": expected {CODECS}, got {{}}",
    ),
    *_each("--compress", ["int8,zstd,x"], f": expected {CODECS}, got 'int8,x'"),
    *_each(
        "--compress",
        ["topk:0", "topk:2", "topk:nan", "topk:-1"],
        r" topk:( share:)? expected a share above 0, up to 0\.5, got ",
    ),
    *_each("--compress", ["topk:", "topk:x"], " topk: share: expected a number, got "),
    *_each("--compress", ["threshold:", "threshold:x"], " threshold: tau: expected a number, got "),
    *_each(
        "--compress",
        ["threshold:0", "threshold:inf", "threshold:nan"],
        " threshold: tau: expected more than 0, and finite, got ",
    ),
    *_each("--compress", ["topk:0.1,foo=1"], " topk: no such option: foo"),
    *_each("--compress", ["topk:0.1,momentum=1"], r" topk: momentum: expected \[0, 1\), got 1"),
    *_each("--compress", ["topk:0.1,clip=-1"], " topk: clip: expected 0 or more, got -1"),
    *_each(
        "--compress",
        ["topk:0.1,warm_up=-1", f"topk:0.1,warm_up={HUGE}"],
        " topk: warm_up: expected (0 to|at most) [0-9]+, got ",
    ),
    *_each(
        "--compress", ["topk:0.1,warm_up=x"], " topk: warm_up: expected a whole number, got 'x'"
    ),
    *_each(
        "--compress-pull",
        ["1bit", "int9", "topk", "topk:", "topk:x", "none,zstd", "fp32"],
        f": expected {PULLS}, got {{}}",
    ),
    *_each(
        "--compress-pull",
        ["topk:0", "topk:2", "topk:nan"],
        r":( pull_share:)? expected a share above 0, up to 0\.5, got ",
    ),
    *_each("--snapshot-every", NO_TIMES, f": expected iterations, as 500, or {TIME}, got {{}}"),
    *_each("--snapshot-every", ["9" * 40], ": expected at most 2147483647, got 9"),
    *_each("--snapshot-keep-for", [*NO_TIMES, "5"], f": expected {TIME}, got {{}}"),
    *_each("--snapshots", ["net.prototxt"], " .*net.prototxt: expected a folder, got a file"),
    *_each("--snapshots", ["s3://", "file:///"], ": expected a place after .*, got none"),
    *(
        row
        for option in (*_COUNTS, "--spark", "--out", "--weights", "--test-data", "--logs")
        for row in _each(option, [""], ": expected a value, got an empty one")
    ),
    # --- files and folders of a training --------------------------------------------------------
    _line(f"{TRAIN} --snapshots foo://x", "foo://x: Unrecognized filesystem type"),
    _line(f"{TRAIN} --snapshots file://host/x", "file://host/x: expected file:///PATH, got a host"),
    _line(f"{TRAIN} --test-data nowhere", "data .*nowhere: expected a folder or a file"),
    _line(f"{TRAIN} --test-data net.prototxt", "data .*net.prototxt: expected data of one"),
    _line(f"{TRAIN} --data nowhere", "data .*nowhere: expected a folder or a file"),
    _line(f"{TRAIN} --data net.prototxt", "data .*net.prototxt: expected data of one"),
    _line(
        f"{TRAIN} --data empty",
        "data .*empty: expected data of one of these formats: IDX, Parquet,",
    ),
    _line(f"{TRAIN} --data /dev/null", "data /dev/null: expected data of one"),
    _line(
        f"{TRAIN} --data {'x' * 300}",
        "--data: expected a path with names of at most 255 bytes, got",
    ),
    _line(f"{TRAIN} --solver nowhere", ".*nowhere: cannot be read: No such file"),
    _line(f"{TRAIN} --solver data", ".*data: cannot be read: Is a directory"),
    _line(f"{TRAIN} --solver net.prototxt", ".*net.prototxt:2: expected a solver, got a net"),
    _line(f"{TRAIN} --solver /dev/null", "/dev/null: expected a prototxt, got an empty file"),
    _line(
        f"{TRAIN} --solver {'x' * 300}",
        "--solver: expected a path with names of at most 255 bytes, got",
    ),
    _line(
        f"{TRAIN} --weights nowhere", ".*nowhere: expected .caffemodel, .h5 or .safetensors, got ''"
    ),
    _line(f"{TRAIN} --weights data", ".*data: expected .caffemodel, .h5 or"),
    _line(
        f"{TRAIN} --weights net.prototxt",
        ".*net.prototxt: expected .caffemodel, .h5 or .safetensors, got",
    ),
    _line(f"{TRAIN} --weights broken.safetensors", ".*broken.safetensors: expected a .safetens"),
    _line(f"{TRAIN} --out data", "run folder .*data: expected a new folder, got one with "),
    _line(f"{TRAIN} --out .", "run folder .*: expected a new folder, got one with "),
    _line(f"{TRAIN} --out net.prototxt", "run folder .*net.prototxt: expected .*, got a file"),
    _line(
        f"{TRAIN} --out net.prototxt/x/y", "run folder .*/x/y: expected .*below the file .*; cho"
    ),
    _line(f"{TRAIN} --out /proc/x", "run folder /proc/x: No such file or directory"),
    _line(
        f"{TRAIN} --out {'x' * 300}", "--out: expected a path with names of at most 255 bytes, got"
    ),
    # --- options that do not go together --------------------------------------------------------
    _line(f"{TRAIN} --shards 65535 --port 7000", "--port: expected 0 to 1, got 7000"),
    _line(f"{TRAIN} --shards 1025", ".*expected 1 to [0-9]+ shards, got 1025"),
    _line(
        f"{TRAIN} --n-push 9 --staleness 4",
        "--staleness: pushing every 9 steps needs at least 8, got 4",
    ),
    _line(
        f"{TRAIN} --n-fetch 9 --staleness 4",
        "--staleness: .*fetching every 9 needs at least 8, got 4",
    ),
    _line(f"{TRAIN} --prefetch --n-fetch 2", "--prefetch: .* got downpour, which pulls every 2"),
    _line(f"{TRAIN} --strategy bsp:c=2", "--strategy bsp: unknown option 'c'; its options are b"),
    _line(f"{TRAIN} --strategy downpour:push=2", "--strategy downpour: .*options are .*, n_push,"),
    _line(f"{TRAIN} --strategy downpour:n_push", "--strategy downpour: n_push: expected n_push=V"),
    _line(f"{TRAIN} --strategy diloco:h=0", "--strategy diloco: .*h: expected 1 to 16384, got 0"),
    _line(f"{TRAIN} --strategy bsp --n-push 2", "--n-push 2: strategy bsp has no such option"),
    _line(f"{TRAIN} --strategy bsp --staleness 3", "--strategy bsp: expected --staleness 0, got 3"),
    _line(
        f"{TRAIN} --strategy bsp --prefetch", "--strategy bsp: expected no prefetch, got prefetch"
    ),
    _line(f"{TRAIN} --durability replicated --port 7400", "--durability replicated: port: expec"),
    _line(f"{TRAIN} --durability replicated --transport shm", "--durability replicated: transp"),
    _line(f"{TRAIN} --durability replicated --link rtt=1ms", "--link: expected shards with one"),
    _line(f"{TRAIN} --link rtt=1ms --transport shm", "--link: expected --transport tcp or auto"),
    _line(f"{TRAIN} --shards-in processes --ray h:1", "--ray h:1: expected shards in Ray, got"),
    _line(f"{TRAIN} --silence-s 2", "--silence-s 2: expected --durability replicated, got memory"),
    _line(f"{TRAIN} --durability logged --rollback-s 5", "--rollback-s 5: expected --durability"),
    _line(f"{TRAIN} --logs x", "--logs .*x: expected --durability process or logged, got memory"),
    _line(f"{TRAIN} --bind 0.0.0.0 --ray 192.0.2.1:1", "Ray: expected RAY_AUTH_MODE=token where"),
    _line(f"{TRAIN} --bind 0.0.0.0 --spark sc://192.0.2.1:1", "Spark at sc://.* --plaintext"),
    _line(f"{TRAIN} --ray 127.0.0.1:1", "Ray at 127.0.0.1:1: expected a server that accepts"),
    _line(f"{TRAIN} --ray ray://127.0.0.1:1", "Ray at ray://127.0.0.1:1: expected a server"),
    _line(f"{TRAIN} --spark spark://127.0.0.1:1", "Spark at spark://127.0.0.1:1: expected a se"),
    _line(f"{TRAIN} --spark sc://127.0.0.1:1", "Spark at sc://127.0.0.1:1: expected a server"),
    # --- usage ----------------------------------------------------------------------------------
    _line("train", "train: expected --solver, or --resume with an earlier run; got neither"),
    _line("train --solver solver.prototxt", "train: expected --out, or --resume with an earlier"),
    _line("train --solver solver.prototxt --data data", "train: expected --out, or --resume with"),
    _line(f"{TRAIN} --wrong 3", "train: expected an option that `downpour train --help` lists, p"),
    _line(f"{TRAIN} extra", "train: expected no further argument, got 'extra'"),
    _line(f"{TRAIN} --shuffle=3", "--shuffle: expected no value"),
    _line(f"{TRAIN} --plaintext=1", "--plaintext: expected no value"),
    _line(f"{TRAIN} --workers", "--workers: expected a value, got none"),
    _line(f"{TRAIN} --workers 1 --workers x", "--workers: expected a whole number, got 'x'"),
    _line(f"{TRAIN} --workers=", "--workers: expected a value, got an empty one"),
    _line("trane", "expected a command that `downpour --help` lists, perhaps train; got 'trane'"),
    _line("xyzzy", "expected a command that `downpour --help` lists; got 'xyzzy'"),
    _line("--foo", "expected an option that `downpour --help` lists; got --foo"),
    _line("version x", "version: expected no further argument, got 'x'"),
    _line("version --x", "version: expected an option that `downpour version --help` lists; got"),
    # --- earlier runs and their snapshots ---------------------------------------------------------
    *(
        _line(f"{command} {place}", f"{place}: {RUN}")
        for command in (
            *("train --resume", "snapshots ls", "snapshots verify", "snapshots take"),
            *("snapshots diff empty", "snapshots restore --output w.safetensors"),
            "reshard --shards 2",
        )
        for place in ("nowhere", "net.prototxt", "run@", "run@x", "@5", f"run@{HUGE}")
        if command != "snapshots diff empty"
    ),
    _line("snapshots diff nowhere data", f"nowhere: {RUN}"),
    _line("snapshots diff empty", "snapshots diff: expected SECOND, got none"),
    _line(f"{TRAIN} --resume foo://x", "foo://x: Unrecognized filesystem type"),
    _line("train --resume data", f"data: {RUN}"),
    _line("train --unset ray", "--unset ray: expected --resume with an earlier run, got none"),
    _line("snapshots foo", "snapshots: expected a command that `downpour snapshots --help`"),
    _line("snapshots ls", "snapshots ls: expected ORIGIN, got none"),
    _line("snapshots ls a b", "snapshots ls: expected no further argument, got 'b'"),
    _line("snapshots verify", "snapshots verify: expected ORIGIN, got none"),
    _line("snapshots restore nowhere", "snapshots restore: expected --output, got none"),
    _line("plot", "plot: expected RUNS, got none"),
    _line("plot nothere", r"nothere/updates\.parquet: expected a folder of updates, got none"),
    _line("plot empty", r"empty/updates\.parquet: expected a folder of updates, got none"),
    _line("plot data --out loss.gif", r"--out: expected a \.png file, got loss\.gif"),
    _line("reshard", "reshard: expected RUN, got none"),
    _line("reshard data", "reshard: expected --shards, got none"),
    *_each("--shards", ["0", "-1"], ": expected at least 1, got {}", "reshard data"),
    *_each("--shards", [HUGE], ": expected at most 2147483647, got {}", "reshard data"),
    *_each("--shards", NO_INTEGERS, ": expected a whole number, got {}", "reshard data"),
    *(
        row
        for before in ("snapshots take data", "reshard data --shards 2")
        for row in [
            *_each(
                "--wait-s", ["0", "-1", "nan"], r": expected at (least|most) \S+, got {}", before
            ),
            *_each("--wait-s", ["inf", "1e300"], ": expected at most 604800, got {}", before),
            *_each("--wait-s", ["x", "5s"], ": expected a number, got {}", before),
        ]
    ),
    # --- doctor and simulate ----------------------------------------------------------------------
    _line("doctor", "doctor: expected --cluster, got none"),
    _line("doctor --cluster nowhere", "cluster file nowhere: No such file or directory"),
    _line("doctor --cluster data", "cluster file data/cluster.json: No such file or directory"),
    _line("doctor --cluster net.prototxt", "cluster file net.prototxt: .*malformed"),
    _line("doctor --cluster empty.json", "cluster file empty.json: .*missing required field"),
    *_each(
        "--compute-ms",
        ["0", "-1", "nan"],
        r": expected at (least|most) \S+, got {}",
        "doctor --cluster data",
    ),
    *_each(
        "--compute-ms",
        ["inf", "1e300"],
        ": expected at most 1000000000, got {}",
        "doctor --cluster data",
    ),
    *_each("--compute-ms", ["x"], ": expected a number, got {}", "doctor --cluster data"),
    *_each(
        "--patience-s",
        ["0", "nan"],
        r": expected at (least|most) \S+, got {}",
        "doctor --cluster data",
    ),
    *_each("--patience-s", ["inf"], ": expected at most 604800, got {}", "doctor --cluster data"),
    *_each("--link", ["rtt", "rtt=1"], ": expected a number with", "doctor --cluster empty.json"),
    *_each("--seed", NO_INTEGERS, ": expected a whole number, got {}", "simulate"),
    *_each("--seed", ["-1"], ": expected at least 0, got {}", "simulate"),
    *_each("--seed", [HUGE], r": expected at most 9\S+, got {}", "simulate"),
    *_each("--seeds", ["0", "-5"], ": expected at least 1, got {}", "simulate"),
    *_each("--seeds", ["x", "1.5"], ": expected a whole number, got {}", "simulate"),
    *_each("--profile", ["x"], ": expected one of within, beyond, got {}", "simulate"),
    *_each("--cluster", ["x"], ": expected one of single, .*, got {}", "simulate"),
    _line("simulate --scenario nowhere", "scenario nowhere: No such file or directory"),
    _line("simulate --scenario data", "scenario data: Is a directory"),
    _line("simulate --scenario net.prototxt", "scenario net.prototxt: Expected '='"),
    _line("simulate --scenario empty.json", "scenario empty.json: Invalid statement"),
    _line("simulate --out", "--out: expected a value, got none"),
    # --- inference --------------------------------------------------------------------------------
    _line("test", "test: expected --solver, got none"),
    _line("test --solver solver.prototxt", "test: expected --weights, got none"),
    _line(TEST, "broken.safetensors: expected a .safetensors file"),
    _line(
        f"{TEST} --weights nowhere", "nowhere: expected .caffemodel, .h5 or .safetensors, got ''"
    ),
    _line(f"{TEST} --weights w.safetensors", "w.safetensors: expected a .safetensors file: No"),
    _line(f"{TEST} --weights data", "data: expected .caffemodel, .h5 or"),
    _line(f"{TEST} --solver nowhere", "nowhere: cannot be read: No such file"),
    _line(f"{TEST} --solver net.prototxt", "net.prototxt:2: expected a solver, got a net"),
    _line(f"{TEST} --solver data", "data: cannot be read: Is a directory"),
    _line(f"{TEST} --data nowhere", "data nowhere: expected a folder or a file, got"),
    _line(
        f"{TEST} --data empty", "data empty: expected data of one of these formats: IDX, Parquet,"
    ),
    _line(f"{TEST} --data net.prototxt", "data net.prototxt: expected data of one"),
    _line(f"{TEST} --bad", "test: expected an option that `downpour test --help` lists; got --bad"),
    _line(f"{TEST} x", "test: expected no further argument, got 'x'"),
    _line("features", "features: expected --net, got none"),
    _line(f"{FEATURES}", "features: expected --output, got none"),
    _line(f"{FEATURES} --output f", "broken.safetensors: expected a .safetensors file"),
    _line(f"{FEATURES} --output f --net nowhere", "nowhere: cannot be read: No such file"),
    _line(
        f"{FEATURES} --output f --net solver.prototxt",
        "solver.prototxt:1: expected a net, got a sol",
    ),
    _line(f"{FEATURES} --output f --net data", "data: cannot be read: Is a directory"),
    _line(f"{FEATURES} --output f --blobs nope", "net.prototxt: expected blobs among data, label"),
    _line(f"{FEATURES} --output f --blobs ,", "--blobs: expected names of blobs, got none"),
    _line(f"{FEATURES} --output f --data nowhere", "data nowhere: expected a folder or a file"),
    _line(f"{FEATURES} --output f --split both", "--split: expected train or test, got both"),
    _line(f"{FEATURES} --output data", "--output data: expected a folder to create, got one that"),
    *_each("--batch-size", NO_INTEGERS, ": expected a whole number, got {}", FEATURES),
    *_each("--batch-size", ["0", "-1"], ": expected at least 1, got {}", FEATURES),
    *_each("--batch-size", [HUGE], ": expected at most 2147483647, got {}", FEATURES),
]
