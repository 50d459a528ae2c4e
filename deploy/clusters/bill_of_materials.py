"""The software bill of materials (SBOM) of a Python environment, in the format CycloneDX 1.6.

`downpour pack` writes one into its archive, and the images have one: which packages are there, in
which version, under which licence as far as their metadata says so, and the SHA-256 of each file.
Compiled modules (.pyc) are left out: they follow from files that are listed.

Equal environments give equal bytes: there is no time and no serial number, which CycloneDX allows.
The images run this as a module, of which the smallest has the base install and little else:

    python -m deploy.clusters.bill_of_materials /opt/downpour/share/sbom.cdx.json
"""

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ps import __version__

BILL = "sbom.cdx.json"
"""The name of a bill in an archive and in an image, with the ending that scanners look for."""
_PROJECT = "downpour-sgd"  # as in requirements.py, which needs more than the base install
_SPDX_OF_PYTHON = "Python-2.0.1"  # of CPython itself, which has no metadata that says so
_PYTHON = ("bin/python", "lib/python")
_LONGEST_NAME = 80  # some packages have the text of their licence where its name belongs

Component = dict[str, Any]


def describe_environment(site: Path, root: Path | None = None) -> Component:
    """The bill of the distributions in `site`, a folder of packages, and of the Python that runs.

    With `root`, a folder that contains `site`, all other files below it are listed, too: shared
    libraries in `lib` as such, because scanners look for their names.
    """
    components, listed = list[Component](), set[Path]()
    for package in sorted(distributions(path=[str(site)]), key=_purl):
        files = list(_list_files(package))
        components.append(_describe_package(package, files))
        listed.update(path for path, _ in files)
    interpreter: Component = {
        "type": "platform",
        "bom-ref": "python",
        "name": platform.python_implementation(),
        "version": platform.python_version(),
        "licenses": [{"expression": _SPDX_OF_PYTHON}],
    }
    if root is not None:
        libraries, of_python, others = list[Component](), list[Component](), list[Component]()
        for path in _walk_files(root):
            name = path.relative_to(root).as_posix()
            if path in listed:
                continue
            if path.parent == root / "lib" and ".so" in path.name:
                libraries.append(_describe_file(path, path.name, "library"))
            elif name.startswith(_PYTHON):
                of_python.append(_describe_file(path, name))
            else:
                others.append(_describe_file(path, name))
        interpreter["components"] = of_python
        components += libraries + others
    components.append(interpreter)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "root",
                "name": _PROJECT,
                "version": __version__,
            }
        },
        "components": components,
    }


def write_bill(path: Path, bill: Component) -> None:
    """Write a bill as JSON, one line for each field or file."""
    path.write_text(json.dumps(bill, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def list_debian_packages() -> list[Component]:
    """The packages that are installed here by dpkg; none where there is no dpkg."""
    program = shutil.which("dpkg-query")
    if program is None:
        return []
    system = platform.freedesktop_os_release()["ID"]
    form = r"${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"
    command = [program, "--show", "--showformat", form]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    components = []
    for line in sorted(done.stdout.splitlines()):
        status, name, version, machine = line.split("\t")
        if status.startswith("ii"):
            purl = f"pkg:deb/{system}/{quote(name)}@{quote(version)}?arch={machine}"
            part = {"type": "library", "bom-ref": purl, "name": name, "version": version}
            components.append({**part, "purl": purl})
    return components


def _describe_package(package: Distribution, files: Iterable[tuple[Path, str]]) -> Component:
    purl, licences = _purl(package), _licences(package)
    return {
        "type": "library",
        "bom-ref": purl,
        "name": package.metadata["Name"],
        "version": package.version,
        "purl": purl,
        **({"licenses": licences} if licences else {}),
        "components": [_describe_file(path, name) for path, name in files],
    }


def _describe_file(path: Path, name: str, kind: str = "file") -> Component:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"type": kind, "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _purl(package: Distribution) -> str:
    """The package URL: the name as the index of packages spells it, and the version."""
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
    return f"pkg:pypi/{name}@{quote(package.version)}"


def _licences(package: Distribution) -> list[Component]:
    """The licence as an SPDX expression (PEP 639), else the names that the metadata has for it."""
    metadata = package.metadata
    if "License-Expression" in metadata:
        return [{"expression": metadata["License-Expression"]}]
    name = metadata["License"].strip() if "License" in metadata else ""
    if name and name != "UNKNOWN" and "\n" not in name and len(name) <= _LONGEST_NAME:
        return [{"license": {"name": name}}]
    classifiers = [text.split(" :: ") for text in metadata.get_all("Classifier") or []]
    names = [words[-1] for words in classifiers if words[0] == "License" and len(words) > 2]
    return [{"license": {"name": name}} for name in sorted(set(names))]


def _list_files(package: Distribution) -> Iterable[tuple[Path, str]]:
    """The files of a package that are there, by the names in its record."""
    for file in sorted(package.files or ()):
        path = Path(str(package.locate_file(file)))
        if path.suffix != ".pyc" and path.is_file() and not path.is_symlink():
            yield path, file.as_posix()


def _walk_files(folder: Path) -> list[Path]:
    paths = (path for path in folder.rglob("*") if path.suffix != ".pyc" and path.name != BILL)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def main(arguments: list[str], site: Path | None = None) -> None:
    """Write the bill of this environment, with the system's packages, to the file named."""
    (target,) = arguments
    bill = describe_environment(site or Path(sysconfig.get_path("purelib")))
    bill["components"] += list_debian_packages()
    write_bill(Path(target), bill)


if __name__ == "__main__":
    main(sys.argv[1:])
