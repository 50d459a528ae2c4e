"""The processes of a job of the service, as a test counts them."""

from deploy.service.launcher import is_subreaper, processes_with


def processes_of(job: str) -> list[int]:
    """The ids of a job's processes, but for the subreaper that waits for them."""
    marked = processes_with({f"DOWNPOUR_JOB={job}"})
    return [pid for pid in marked if not is_subreaper(pid)]
