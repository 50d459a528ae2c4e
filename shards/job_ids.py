"""A job's id, and what may be said of it to everybody.

Where shards speak no CURVE, whoever names the job is heard, so its id is a secret: the random part
that `shard_specs` ends it with. It is in messages, and in files of this user's alone. Where others
may read, as in the names of files and in tables, the job is called otherwise.
"""

import hashlib


def digest_of(job: str) -> str:
    """16 hexadecimal digits that only this job has, and that the id cannot be told from."""
    return hashlib.sha256(job.encode()).hexdigest()[:16]


def short_id(job: str) -> str:
    """What everybody may call it: its name, and the digest in place of the random part."""
    name, _, _ = job.rpartition("-")
    return f"{name}-{digest_of(job)}" if name else digest_of(job)
