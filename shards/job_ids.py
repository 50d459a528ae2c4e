"""A job's secret id, and the public forms of it.

Without CURVE, shards accept messages from any process that names the job, so the id is a secret:
`shard_specs` appends a random part to the name. The id appears in messages and in files that only
this user can read. Where others may read, as in file names and tables, a public form is used.
"""

import hashlib


def digest_of(job: str) -> str:
    """16 hexadecimal digits that identify the job without revealing its id."""
    return hashlib.sha256(job.encode()).hexdigest()[:16]


def short_id(job: str) -> str:
    """The public form of a job's id: its name, and the digest in place of the random part."""
    name, _, _ = job.rpartition("-")
    return f"{name}-{digest_of(job)}" if name else digest_of(job)
