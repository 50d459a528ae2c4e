"""Links as if they had been measured, and the advice for them."""

from msgspec.structs import replace

from ps.links.advisor import Advice, advise
from ps.links.benchmark import LinkFigures
from shards.messages import PROTOCOL
from shards.schema_digest import SCHEMA

MB = 1_000_000


def make_link(rtt_s: float, rate: float, **other: float) -> LinkFigures:
    """A link of this rate each way, in bytes a second, with one connection or several."""
    figures = LinkFigures(
        shard=0,
        rtt_s=rtt_s,
        jitter_s=0.0,
        up=rate,
        down=rate,
        striped_up=rate,
        striped_down=rate,
        skew_s=0.0,
        protocol=PROTOCOL,
        schema=SCHEMA,
        own_cpu_s_per_gb=1.0,
        shard_cpu_s_per_gb=1.0,
    )
    return replace(figures, **other)


def advise_for(rtt_s: float, rate: float, compute_s: float, size: int = MB) -> Advice:
    """The advice for one shard of `size` bytes behind such a link."""
    return advise([make_link(rtt_s, rate)], [size], ["tcp://10.0.0.1:7400"], compute_s)
