"""Bills of materials: CycloneDX accepts them, they have all that is there, and are reproducible."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.clusters.bill_of_materials import BILL, describe_environment, main, write_bill
from tests.support.bills import check_bill, list_parts

METADATA = "Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}\n"
LONG_TEXT = "License: Copyright (c) 2001\n        Permission is granted.\n"
BSD = "Classifier: License :: OSI Approved :: BSD License\n"


def install(site: Path, name: str, version: str, more: str = "") -> None:
    """Write a distribution with one module of its name, a compiled one and a record."""
    folder = site / f"{name.lower()}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA.format(name=name, version=version, more=more))
    (site / f"{name.lower()}.py").write_text(f"version = {version!r}\n")
    cache = site / "__pycache__" / f"{name.lower()}.cpython-311.pyc"
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(b"compiled")
    names = [f"{name.lower()}.py", f"__pycache__/{cache.name}", f"{folder.name}/METADATA"]
    names += [f"{folder.name}/RECORD", "../bin/script"]
    (folder / "RECORD").write_text("".join(f"{path},,\n" for path in names))


def environment(root: Path, *, backwards: bool = False) -> Path:
    """A folder of packages below `root`, with a library and a program next to it."""
    site = root / "lib" / "python3.11" / "site-packages"
    packages = [
        ("downpour-sgd", "0.1.0", "License-Expression: Apache-2.0\n"),
        ("Zoo.Keeper", "2.0+local", "License: MIT License\n"),
        ("longtext", "1.0", LONG_TEXT + BSD),
        ("bare", "3.1", ""),
    ]
    for package in packages[::-1] if backwards else packages:
        install(site, *package)
    (root / "lib" / "libssl.so.3").write_bytes(b"library")
    (root / "demo.txt").write_text("demo")
    (root / "bin").mkdir()
    (root / "bin" / "python3.11").write_bytes(b"program")
    (root / "bin" / "python").symlink_to("python3.11")
    return site


def test_it_lists_packages_licences_and_files(tmp_path: Path) -> None:
    """Names, versions and URLs as the index has them; licences where the metadata states one."""
    site = environment(tmp_path)
    bill = describe_environment(site, tmp_path)
    write_bill(tmp_path / BILL, bill)
    check_bill((tmp_path / BILL).read_text())
    parts = {part["name"]: part for part in bill["components"]}
    assert parts["Zoo.Keeper"]["purl"] == "pkg:pypi/zoo-keeper@2.0%2Blocal"
    licences = {name: part.get("licenses") for name, part in parts.items()}
    assert licences["downpour-sgd"] == [{"expression": "Apache-2.0"}]
    assert licences["Zoo.Keeper"] == [{"license": {"name": "MIT License"}}]
    assert licences["longtext"] == [{"license": {"name": "BSD License"}}]
    assert licences["bare"] is None
    digest = hashlib.sha256(b"version = '3.1'\n").hexdigest()
    assert parts["bare"]["components"][-1] == {
        "type": "file",
        "name": "bare.py",
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    assert parts["libssl.so.3"]["type"] == "library"
    assert [part["name"] for part in parts["CPython"]["components"]] == ["bin/python3.11"]
    assert parts["demo.txt"]["type"] == "file"
    names = [part["name"] for part in list_parts(bill)]
    assert not [name for name in names if name.endswith(".pyc")]


def test_equal_environments_give_equal_bytes(tmp_path: Path) -> None:
    """Neither the folder, the time nor the order of installation shows."""
    for number in range(2):
        root = tmp_path / str(number)
        write_bill(root / BILL, describe_environment(environment(root, backwards=number > 0), root))
        write_bill(root / BILL, describe_environment(environment_of(root), root))  # not in itself
    assert (tmp_path / "0" / BILL).read_bytes() == (tmp_path / "1" / BILL).read_bytes()


def environment_of(root: Path) -> Path:
    (site,) = (root / "lib").glob("*/site-packages")
    return site


def test_an_image_has_the_packages_of_debian_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Dockerfile's command adds the packages that dpkg has installed, if there is a dpkg."""
    site = environment(tmp_path)
    main([str(tmp_path / "image.json")], site)
    text = (tmp_path / "image.json").read_text()
    check_bill(text)
    purls = [part["purl"] for part in json.loads(text)["components"] if "purl" in part]
    assert "pkg:pypi/bare@3.1" in purls
    assert any(purl.startswith("pkg:deb/") for purl in purls) is bool(shutil.which("dpkg-query"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    main([str(tmp_path / "other.json")], site)
    assert "pkg:deb" not in (tmp_path / "other.json").read_text()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bill: bill["components"][0].pop("name"),
        lambda bill: bill["components"][0].update(licenses=[{"expression": 1}]),
        lambda bill: bill["components"].append(bill["components"][0]),
        lambda bill: bill.update(colour="blue"),
    ],
)
def test_the_schema_refuses_a_wrong_bill(spoil: Any, tmp_path: Path) -> None:
    """A part without a name, a licence of the wrong type, a part twice, an unknown field."""
    bill = describe_environment(environment(tmp_path), tmp_path)
    spoil(bill)
    with pytest.raises(AssertionError):
        check_bill(json.dumps(bill))
