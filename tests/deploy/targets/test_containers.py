"""Images and Compose: linters accept them, nobody is root, and what they name exists."""

import platform
import re
import shlex
import shutil
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.clusters import bill_of_materials
from tests.support.command_parser import parse
from tests.support.target_tools import TARGETS, output_of, tool

ROOT = Path(__file__).parents[3]
IMAGES, COMPOSE = TARGETS / "images", TARGETS / "compose"
STAND_INS = ROOT / "tests" / "bench" / "stand_ins"
DOCKERFILE = (IMAGES / "Dockerfile").read_text()
FINAL = ("service", "executor", "driver", "gpu")
FILE: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
SERVICES: dict[str, Any] = FILE["services"]
SCRIPTS = sorted(
    path
    for path in (*TARGETS.rglob("*"), *STAND_INS.iterdir())
    if path.is_file() and path.read_bytes().startswith(b"#!/bin/sh")
)


def stages() -> dict[str, str]:
    """The instructions of each stage of the Dockerfile, by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


@pytest.mark.parametrize("folder", [IMAGES, STAND_INS], ids=lambda folder: folder.name)
def test_hadolint_finds_no_fault(folder: Path) -> None:
    """It prints nothing about a Dockerfile: versions of Debian's packages are the base's."""
    assert output_of(tool("hadolint"), str(folder / "Dockerfile")) == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_no_fault(script: Path) -> None:
    """Each script is executable, stops at errors unless it is one command, and has no fault."""
    output_of(tool("shellcheck"), str(script))
    assert script.stat().st_mode & stat.S_IXUSR
    assert "set -eu" in script.read_text() or "exec " in script.read_text()


def test_jars_keep_the_libraries_of_this_system(tmp_path: Path) -> None:
    """Of the natives in PySpark's jars those stay that Linux with glibc loads on this processor;
    a jar without others is not touched."""
    processor = {"x86_64": "amd64", "aarch64": "aarch64"}[platform.machine()]
    stays = ["META-INF/MANIFEST.MF", "Codec.class", f"linux/{processor}/libcodec.so", "any/libx.so"]
    goes = ["win/amd64/codec.dll", "darwin/aarch64/codec.dylib", "linux/s390x/libcodec.so"]
    goes += ["liba-linux64-musl.so", "liba-linux-aarch64-musl.so", "osx/libx.jnilib"]
    for jar, names in (("mixed.jar", [*stays, *goes]), ("plain.jar", stays)):
        with zipfile.ZipFile(tmp_path / jar, "w") as archive:
            for name in names:
                archive.writestr(name, name)
    plain = (tmp_path / "plain.jar").read_bytes()
    output_of(sys.executable, str(IMAGES / "drop-natives"), str(tmp_path))
    with zipfile.ZipFile(tmp_path / "mixed.jar") as smaller:
        assert {name: smaller.read(name).decode() for name in smaller.namelist()} == dict(
            zip(stays, stays, strict=True)
        )
    assert (tmp_path / "plain.jar").read_bytes() == plain
    assert {path.name for path in tmp_path.iterdir()} == {"mixed.jar", "plain.jar"}


@pytest.mark.parametrize("stage", FINAL)
def test_images_run_as_a_number_and_show_their_health(stage: str) -> None:
    """A user by number, which Kubernetes can check, and a health check that exists."""
    text = stages()[stage]
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    (check,) = re.findall(r'^HEALTHCHECK .*CMD \["(\S+)",', text, re.MULTILINE)
    assert (IMAGES / Path(check).name).is_file()


@pytest.mark.parametrize("stage", FINAL)
def test_images_have_their_bill_of_materials(stage: str) -> None:
    """It is written as root, after all that is in the image, by a module that the image has."""
    command = f"-m {bill_of_materials.__name__} /opt/downpour/share/{bill_of_materials.BILL}\n"
    assert command in stages()[stage]
    after = re.findall(r"^[A-Z]+", stages()[stage].partition(command)[2], re.MULTILINE)
    assert after[0] == "USER"
    assert not {"COPY", "RUN"} & set(after)


def test_the_base_is_an_argument() -> None:
    """No image is named but the base, which has no default: nothing floats."""
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert bases[0] == "${BASE}"
    assert set(bases[1:]) <= stages().keys()
    assert re.search(r"^ARG BASE$", DOCKERFILE, re.MULTILINE)


def test_what_is_copied_exists() -> None:
    """Each file of the checkout that the Dockerfile copies is there, and not left out."""
    allowed = {
        line[1:]
        for line in (IMAGES / "Dockerfile.dockerignore").read_text().split()
        if line[0] == "!"
    }
    for words in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for name in words.split():
            assert list(ROOT.glob(name)), name
            top = name.partition("/")[0]
            assert any(Path(top).match(pattern) for pattern in allowed), name


def test_extras_exist() -> None:
    """Each extra that an image installs is one of the project's."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    used = re.findall(r"downpour-sgd\[([\w,]+)\]", DOCKERFILE)
    assert used
    for names in used:
        assert set(names.split(",")) <= extras["optional-dependencies"].keys()


def test_the_entrypoint_starts_what_spark_has(tmp_path: Path) -> None:
    """Its arguments are those of Spark's own class, and other words are a command."""
    import zipfile

    import pyspark

    text = (IMAGES / "entrypoint").read_text()
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-kubernetes_*.jar")
    (kind,) = re.findall(r"org\.apache\.spark\.\S+Backend", text)
    with zipfile.ZipFile(jar) as archive:
        path = kind.replace(".", "/")
        classes = [name for name in archive.namelist() if name.startswith(path)]
        content = b"".join(map(archive.read, classes))
    options = re.findall(r"^ +(--[A-Za-z-]+) ", text, re.MULTILINE)
    assert len(options) == 7
    assert [option for option in options if option.encode() not in content] == []
    assert output_of(str(IMAGES / "entrypoint"), "echo", "a command") == "a command\n"


def test_compose_fits_its_schema() -> None:
    """check-jsonschema accepts the file by Compose's own schema."""
    output_of(
        tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec",
        str(COMPOSE / "compose.yaml"),
    )  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_confined(name: str) -> None:
    """No root, a fixed root file system, no capability, requests, limits and a health check."""
    service = SERVICES[name]
    assert int(service["user"].partition(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for part in ("reservations", "limits"):
        assert {"cpus", "memory"} == service["deploy"]["resources"][part].keys()
    assert service["healthcheck"]["test"][0] == "CMD"
    image = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", service["image"])
    assert image.rpartition(":")[2] not in {"", "latest", image}


def test_compose_names_what_there_is() -> None:
    """Secrets, volumes and files that services name are declared, and secrets are set up."""
    made = (COMPOSE / "setup.sh").read_text()
    for secret in FILE["secrets"].values():
        assert secret["file"].removeprefix("./") in made
    for service in SERVICES.values():
        for secret in service.get("secrets", []):
            name = secret if isinstance(secret, str) else secret["source"]
            assert name in FILE["secrets"]
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("./secrets/"):
                assert source.removeprefix("./") in made
            elif source.startswith("."):
                assert (COMPOSE / source).is_file(), source
            else:
                assert source in FILE["volumes"]
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= SERVICES.keys()


def test_commands_exist() -> None:
    """The commands of `downpour` in Compose and in the chart's pods parse."""
    shell = SERVICES["service"]["command"][2].replace("$$", "$")
    lines = [line for line in re.split(r";|\|\|", shell) if "downpour" in line]
    for line in lines:
        words = shlex.split(line.partition(">")[0])
        if "downpour" in words:
            parse(words[words.index("downpour") :])
    assert sum("downpour " in line for line in lines) == 2


def test_setup_makes_private_secrets_once(tmp_path: Path) -> None:
    """setup.sh makes every secret that is missing, for its owner alone, and changes none."""
    script = tmp_path / "setup.sh"
    shutil.copy(COMPOSE / "setup.sh", script)
    output_of(str(script))
    secrets = {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
    assert secrets.keys() == {Path(item["file"]).name for item in FILE["secrets"].values()}
    for path in (tmp_path / "secrets").iterdir():
        assert path.name == "tls.crt" or not path.stat().st_mode & 0o077, path
    output_of(str(script))
    assert {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()} == secrets
    assert len(secrets["ray-token"].strip()) == 64


def test_prometheus_has_a_valid_configuration() -> None:
    """promtool accepts the configuration, which reads the project's own alerts."""
    config = str(COMPOSE / "prometheus.yml")
    assert "SUCCESS" in output_of(tool("promtool"), "check", "config", "--syntax-only", config)
