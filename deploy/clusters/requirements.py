"""The packages that a part of this project needs, as the extras in its metadata declare them.

The extra `executor` of pyproject.toml lists once what the Python of a Spark executor needs on top
of the base install. `downpour doctor`, `downpour pack` and the images read that list here, from the
metadata of the installation.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shards.errors import BadInput

DISTRIBUTION = "downpour-sgd"
EXECUTOR = "executor"


def list_requirements(extras: Iterable[str]) -> list[Requirement]:
    """The direct requirements of this project with `extras`, without its references to itself.

    Raises BadInput for an extra that the installed metadata does not declare.
    """
    project = _metadata()
    declared = project.metadata.get_all("Provides-Extra") or []
    ahead = ["", *dict.fromkeys(extras)]
    for extra in ahead[1:]:
        if extra not in declared:
            raise BadInput(
                f"extra {extra!r}",
                expected=f"one of {', '.join(sorted(declared))}",
                hint="install the project again if this one is new (make install)",
            )
    requirements: list[Requirement] = []
    for extra in ahead:  # grows by the extras that an extra refers to
        for requirement in _active(project, {extra}):
            if canonicalize_name(requirement.name) == DISTRIBUTION:
                ahead += sorted(requirement.extras - set(ahead))
            else:
                requirement.marker = None  # pip would apply it again, and knows no extra
                if requirement not in requirements:
                    requirements.append(requirement)
    return requirements


def find_distributions(extras: Iterable[str]) -> tuple[dict[str, Distribution], list[str]]:
    """The installed distributions that this project needs with `extras`, and what is missing.

    The first are all direct and indirect requirements by their canonical names, in order; the
    second has a line for each requirement that is not installed, or in another version.
    """
    installed: dict[str, Distribution] = {}
    missing: list[str] = []
    ahead = list_requirements(extras)
    seen: set[tuple[str, frozenset[str]]] = set()
    while ahead:
        requirement = ahead.pop()
        name = canonicalize_name(requirement.name)
        key = name, frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            present = distribution(name)
        except PackageNotFoundError:
            present = None
        fault = compare_version(requirement, None if present is None else present.version)
        if fault is not None:
            missing.append(f"{_without_marker(requirement)}, {fault}")
        if present is None:
            continue
        installed[name] = present
        ahead += _active(present, {"", *requirement.extras})
    return dict(sorted(installed.items())), sorted(missing)


def compare_version(requirement: Requirement, version: str | None) -> str | None:
    """Why an installed version, None for none, does not meet a requirement; None if it does."""
    if version is None:
        return "not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"installed is {version}"
    return None


def missing_on_executor() -> list[str]:
    """A line for each package that this Python lacks to run a worker in a Spark task."""
    return find_distributions([EXECUTOR])[1]


def _metadata() -> Distribution:
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise BadInput(
            DISTRIBUTION,
            expected="an installation of it",
            got="its code alone",
            hint="pip install it",
        ) from None


def _active(of: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    """The requirements of a distribution that apply here with one of `extras`, "" for none."""
    for text in of.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def _without_marker(requirement: Requirement) -> str:
    return str(requirement).partition(";")[0].strip()
