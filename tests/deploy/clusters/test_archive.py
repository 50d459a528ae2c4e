"""Archives with a Python: what is refused, and what makes two of them equal."""

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from platform import machine

import pytest
from packaging.requirements import Requirement

from deploy.clusters import archive as packing
from deploy.clusters.archive_check import MANIFEST, check_archive, check_links
from deploy.clusters.archive_libraries import bundle_libraries, machine_of
from deploy.clusters.requirements import find_distributions, list_requirements
from shards.errors import BadInput
from tests.support.cli_in_process import Run

ROOT = Path(__file__).parents[3]
THIS, OTHER = (62, 183) if machine() == "x86_64" else (183, 62)


def elf(number: int) -> bytes:
    """The first bytes of a program for the machine with this number in the format ELF."""
    return (
        b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + number.to_bytes(2, "little") + bytes(44)
    )


def write_archive(path: Path, *members: tuple[str, bytes | str, bytes]) -> Path:
    """A .tar.gz with these members: name, content or target of a link, type."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if isinstance(content, str):
                member.linkname = content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


Member = tuple[str, bytes | str, bytes]
PYTHON: Member = ("bin/python3", elf(THIS), tarfile.REGTYPE)
LINK: Member = ("bin/python", "python3", tarfile.SYMTYPE)


def manifest(glibc: str) -> bytes:
    return (
        f'{{"version": "1", "build": "b", "python": "3.11", "machine": "{machine()}",'
        f' "glibc": "{glibc}", "extras": [], "packages": {{}}}}'
    ).encode()


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([PYTHON, ("bin/python", "/usr/bin/python3", tarfile.SYMTYPE)], "one to /usr/bin/python3"),
        ([PYTHON, LINK, ("lib/a", "../../a", tarfile.SYMTYPE)], "lib/a: expected a link to a file"),
        ([PYTHON, LINK, ("lib/a", "/etc/passwd", tarfile.LNKTYPE)], "got one to /etc/passwd"),
        ([PYTHON, LINK, ("../a", b"", tarfile.REGTYPE)], "expected names inside it, got ../a"),
        ([PYTHON], "expected an interpreter at bin/python, got none"),
        ([LINK], "expected an interpreter at bin/python, got none"),
        ([("bin/python", b"#!/bin/sh\n", tarfile.REGTYPE)], "expected an interpreter"),
        ([("bin/python", elf(OTHER), tarfile.REGTYPE)], f"expected an interpreter for {machine()}"),
        ([PYTHON, LINK, (MANIFEST, manifest("2.999"), tarfile.REGTYPE)], "expected glibc 2.999"),
        ([PYTHON, LINK, (MANIFEST, b"[]", tarfile.REGTYPE)], MANIFEST),
    ],
)  # fmt: skip
def test_what_runs_only_elsewhere_is_refused(
    members: list[Member], said: str, tmp_path: Path
) -> None:
    """A link out of the archive, another machine, a newer glibc: one line with a remedy."""
    path = write_archive(tmp_path / "a.tar.gz", *members)
    with pytest.raises(BadInput) as refused:
        check_archive(path)
    assert said in str(refused.value)
    assert "downpour pack" in str(refused.value)


def test_a_whole_archive_is_accepted(tmp_path: Path) -> None:
    """With a manifest or, from another tool, without one."""
    members: list[Member] = [PYTHON, LINK, ("lib/b", "../bin/python", tarfile.SYMTYPE)]
    assert check_archive(write_archive(tmp_path / "a.tar.gz", *members)).manifest is None
    described: Member = (MANIFEST, manifest("2.17"), tarfile.REGTYPE)
    facts = check_archive(write_archive(tmp_path / "b.tar.gz", *members, described))
    assert facts.machine == machine()
    assert facts.manifest is not None
    assert facts.manifest.glibc == "2.17"


@pytest.mark.parametrize("damage", [lambda content: content[:60], lambda _: b"text", lambda _: b""])
def test_a_damaged_archive_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A file that is cut, or is no archive, ends in one line that names it."""
    path = write_archive(tmp_path / "a.tar.gz", PYTHON, LINK, ("x", os.urandom(9000), b"0"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=r"a\.tar\.gz"):
        check_archive(path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "missing"])
def test_links_out_of_a_folder_are_refused(target: str, tmp_path: Path) -> None:
    """Before an archive is written, a link that leads out of it or nowhere is named."""
    (tmp_path / "outside").write_text("")
    root = tmp_path / "root"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "file").write_text("")
    (root / "lib" / "good").symlink_to("file")
    check_links(root)
    (root / "lib" / "bad").symlink_to(target)
    with pytest.raises(BadInput, match="link lib/bad: expected a target in the archive"):
        check_links(root)


def test_the_needs_of_executors_are_those_of_the_extra() -> None:
    """The list is the one in pyproject.toml, and all of it is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["executor"]
    needs = {str(need) for need in list_requirements(["executor"])}
    assert needs == {str(Requirement(text)) for text in declared}
    installed, missing = find_distributions(["executor"])
    assert missing == []
    assert {"numpy", "pandas", "pyarrow", "pytz"} <= installed.keys()


def test_an_extra_contains_those_that_it_refers_to() -> None:
    """`spark` names `executor`, and so has its packages, too."""
    inner = {need.name for need in list_requirements(["executor"])}
    assert inner < {need.name for need in list_requirements(["spark"])}


def test_two_trees_of_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    """Times, modes beyond the owner's, and the order of creation do not matter."""
    names = ["b", "a/c", "a/b", "z"]
    for number, order in enumerate((names, names[::-1])):
        root = tmp_path / str(number)
        for name in order:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
            path.chmod(0o640 if number else 0o644)
            os.utime(path, (number, number))
        (root / "link").symlink_to("a/b")
        packing._write_tar(root, tmp_path / f"{number}.tar.gz")
    first, second = ((tmp_path / f"{number}.tar.gz").read_bytes() for number in range(2))
    assert first == second
    with tarfile.open(tmp_path / "0.tar.gz") as archive:
        owners = {(member.uid, member.gid, member.uname) for member in archive}
        assert owners == {(0, 0, "")}
        assert archive.getnames() == ["a", "a/b", "a/c", "b", "link", "z"]


def test_a_package_that_contains_others_has_its_own_record(tmp_path: Path) -> None:
    """Ray has the metadata of psutil and others in folders of its own; its record is not theirs."""
    names = ["ray/parts/psutil-7.0.dist-info/METADATA", "ray-2.60.dist-info/METADATA", "ray/a.py"]
    (tmp_path / "ray-2.60.dist-info").mkdir()
    packing._write_record(tmp_path, [PurePosixPath(name) for name in names])
    (record,) = tmp_path.rglob("RECORD")
    assert record.parent.name == "ray-2.60.dist-info"
    listed = [line.partition(",")[0] for line in record.read_text().splitlines()]
    assert listed == [*sorted(names), "ray-2.60.dist-info/RECORD"]


@pytest.mark.skipif(sys.platform != "linux", reason="shared libraries of Linux")
def test_libraries_are_found_next_to_the_program(tmp_path: Path) -> None:
    """The copied interpreter loads the libraries that were copied with it, and the host's glibc."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_bytes(Path(sys.executable).resolve().read_bytes())
    program.chmod(0o755)
    bundle_libraries(tmp_path, [program])
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    loaded = [line.split(" => ")[1].split()[0] for line in listed.splitlines() if " => " in line]
    foreign = [path for path in loaded if not path.startswith((str(tmp_path), "/lib", "/usr/lib"))]
    assert foreign == []
    assert machine_of(program.read_bytes()[:20]) == machine()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.zip"], "expected a name that ends in .tar.gz, got a.zip"),
        (["here.tar.gz"], "here.tar.gz exists; choose another name, or give --force"),
        (["no/a.tar.gz"], "expected an existing folder"),
        (["a.tar.gz", "--wheelhouse", "no"], "--wheelhouse: expected a folder of wheels, got no"),
        (["a.tar.gz", "--extra", "execute"], "extra 'execute': expected one of"),
        (["here.tar.gz", "--check", "--force"], "--check: expected no other option"),
        (["here.tar.gz", "--check"], "here.tar.gz: expected a whole .tar.gz"),
        (["none.tar.gz", "--check"], "none.tar.gz: No such file or directory"),
    ],
)
def test_wrong_options(arguments: list[str], said: str, downpour: Run, job: Path) -> None:
    """Each ends in one line with status 2, and nothing is written."""
    (job / "here.tar.gz").write_text("")
    before = sorted(job.iterdir())
    status, out, err = downpour("pack", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert sorted(job.iterdir()) == before


def test_a_missing_package_is_named(
    downpour: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment without a package of the extra says which, and what to do."""
    monkeypatch.setattr(
        packing, "find_distributions", lambda _: ({}, ["pandas>=2.2, not installed"])
    )
    status, _, err = downpour("pack", "a.tar.gz")
    assert status == 2
    assert "got pandas>=2.2, not installed; install these extras here, or give --wheelhouse" in err


def test_a_folder_without_wheels_is_refused(downpour: Run, job: Path) -> None:
    """An empty wheelhouse names the first package that it lacks, and leaves no archive."""
    (job / "wheels").mkdir()
    status, _, err = downpour("pack", "a.tar.gz", "--wheelhouse", "wheels")
    assert (status, err.count("\n")) == (2, 1)
    assert "--wheelhouse wheels: expected wheels of all requirements, got No matching" in err
    assert not (job / "a.tar.gz").exists()
