"""The meaning of a Spark URL, and the settings of each kind of session."""

import re
import sys
from pathlib import Path

import pytest

from shards.errors import BadInput
from worker.spark import settings as spark_settings


@pytest.mark.parametrize(
    ("url", "master"),
    [
        (None, "local[3,4]"),
        ("local", "local[3,4]"),
        ("local[8]", "local[8,4]"),
        ("local[*]", "local[*,4]"),
        ("local[2, 1]", "local[2,1]"),
        ("spark://h:1", None),
        ("locals", None),
        ("yarn", None),
    ],
)
def test_embedded_master(url: str | None, master: str | None) -> None:
    """No URL means the slots asked for; a killed worker costs an attempt unless the user says."""
    assert spark_settings.parse_local_master(url, 3) == master


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("spark://h:7077", [("h", 7077)]),
        ("spark://a:1,b:2", [("a", 1), ("b", 2)]),
        ("spark://[::1]:7077", [("::1", 7077)]),
        ("k8s://https://h:6443", [("h", 6443)]),
        ("k8s://h:6443", [("h", 6443)]),
        ("k8s://https://h", [("h", 443)]),
        ("sc://h", [("h", 15002)]),
        ("sc://h:9/;token=a:b;use_ssl=true", [("h", 9)]),
    ],
)
def test_addresses(url: str, addresses: list[tuple[str, int]]) -> None:
    """Every server that a URL names is found, with its scheme's own port where none is given."""
    assert spark_settings.addresses(url, {}) == addresses


@pytest.mark.parametrize(
    "url", ["spark://h", "spark://h:x", "spark://:7077", "http://h:80", "h:7077", "mesos://h:1", ""]
)
def test_no_spark_url(url: str) -> None:
    """Any other URL is refused in one line that gives the forms there are and the one that came."""
    got = re.escape(repr(url))
    with pytest.raises(BadInput, match=f"^Spark URL: expected spark://.*, got {got}$"):
        spark_settings.addresses(url, {})


def test_yarn_needs_its_files() -> None:
    """`yarn` names no server: Hadoop's files do, and must be pointed to."""
    assert spark_settings.addresses("yarn", {"YARN_CONF_DIR": "/etc/hadoop"}) == []
    with pytest.raises(BadInput, match="expected HADOOP_CONF_DIR to be set, got none"):
        spark_settings.addresses("yarn", {})


_HA = """<configuration>
<property><name>yarn.resourcemanager.ha.rm-ids</name><value>a, b</value></property>
<property><name>yarn.resourcemanager.hostname.a</name><value>h1</value></property>
<property><name>yarn.resourcemanager.address.b</name><value>h2:99</value></property>
</configuration>"""


def test_resource_managers(tmp_path: Path) -> None:
    """The ResourceManagers of Hadoop's files are found, also where one stands by."""
    (tmp_path / "yarn-site.xml").write_text(_HA)
    managers = spark_settings.addresses("yarn", {"HADOOP_CONF_DIR": str(tmp_path)})
    assert managers == [("h1", 8032), ("h2", 99)]
    assert "h1:8032 or h2:99" in spark_settings.name_servers("yarn", managers)
    (tmp_path / "yarn-site.xml").write_text("<configuration>")
    with pytest.raises(BadInput, match=r"yarn-site\.xml: expected settings of YARN as XML, got "):
        spark_settings.addresses("yarn", {"HADOOP_CONF_DIR": str(tmp_path)})


def test_embedded_keeps_to_itself(tmp_path: Path) -> None:
    """An embedded session listens on loopback only and writes only below its folder."""
    settings = spark_settings.prepare_embedded_settings("local[2,4]", "app", 2, tmp_path)
    assert settings["spark.driver.host"] == settings["spark.driver.bindAddress"] == "127.0.0.1"
    assert settings["spark.speculation"] == "false"
    for place in ("spark.local.dir", "spark.sql.warehouse.dir"):
        assert Path(settings[place]).is_relative_to(tmp_path)
    assert f'"-Djava.io.tmpdir={tmp_path}"' in settings["spark.driver.extraJavaOptions"]
    assert "level = error" in (tmp_path / "log4j2.properties").read_text()


def test_a_cluster_keeps_its_own_settings() -> None:
    """A cluster's own settings for memory, cores and Java are left as they are."""
    settings = spark_settings.cluster("spark://h:1", "app", "10.0.0.5", {}, {})
    ours = {name for name in settings if not name.startswith("spark.executorEnv.")}
    assert ours == {
        "spark.app.name",
        "spark.driver.host",
        "spark.master",
        "spark.speculation",
        "spark.ui.showConsoleProgress",
    }
    assert settings["spark.executorEnv.OPENBLAS_NUM_THREADS"] == "1"
    assert "spark.driver.host" not in spark_settings.cluster("yarn", "app", None, {}, {})


def test_a_driver_behind_nat() -> None:
    """Executors are given the advertised address, and the driver binds the host's own."""
    nat = {"spark.driver.host": "nat.example"}
    settings = spark_settings.cluster("spark://h:1", "app", "10.0.0.5", nat, {})
    assert settings["spark.driver.host"] == "nat.example"
    assert settings["spark.driver.bindAddress"] == "10.0.0.5"
    bound = nat | {"spark.driver.bindAddress": "0.0.0.0"}
    settings = spark_settings.cluster("spark://h:1", "app", "10.0.0.5", bound, {})
    assert settings["spark.driver.bindAddress"] == "0.0.0.0"
    own = {"SPARK_LOCAL_IP": "10.0.0.6"}
    settings = spark_settings.cluster("spark://h:1", "app", "10.0.0.5", nat, own)
    assert settings["spark.driver.bindAddress"] == "10.0.0.6"
    assert "spark.driver.host" not in spark_settings.cluster("yarn", "app", "10.0.0.5", {}, own)


def test_cluster_driver_keeps_its_files_together(tmp_path: Path) -> None:
    """The driver's files go into its folder, and the user's Java options stay; so does the user's
    choice of a cluster's Python."""
    environ = {"JAVA_TOOL_OPTIONS": "-Dx=1", "PYSPARK_PYTHON": "/opt/python"}
    assert spark_settings.cluster_environment(tmp_path, environ, "10.0.0.5") == {
        "JAVA_TOOL_OPTIONS": f'-Dx=1 "-Djava.io.tmpdir={tmp_path}"',
        "PYSPARK_PYTHON": "/opt/python",
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": str(tmp_path),
        "SPARK_LOCAL_IP": "10.0.0.5",
    }
    chosen = {"SPARK_LOCAL_IP": "10.0.0.6"}
    own = spark_settings.cluster_environment(tmp_path, chosen, "10.0.0.5")
    assert own["SPARK_LOCAL_IP"] == "10.0.0.6"
    own = spark_settings.cluster_environment(tmp_path, {}, None)
    assert "SPARK_LOCAL_IP" not in own
    assert own["JAVA_TOOL_OPTIONS"] == f'"-Djava.io.tmpdir={tmp_path}"'
    assert own["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize("url", ["sc://h:1/;token=SECRET==", "sc://h:x/;user_id=a;token=SECRET=="])
def test_a_token_is_shown_nowhere(url: str) -> None:
    """A token is not shown with the URL, nor in messages that quote the URL or its options."""
    assert spark_settings.hide_url_options(url) == url.partition(";")[0]
    said = f"bad URL {url}: 'token=SECRET==' should be a key=value pair"
    told = spark_settings.without_options(said, url)
    assert "SECRET" not in told
    assert "'token=...' should be a key=value pair" in told
    if ":x" in url:
        with pytest.raises(BadInput) as caught:
            spark_settings.addresses(url, {})
        assert str(caught.value).endswith(", got 'sc://h:x/'")


ON = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}


@pytest.mark.parametrize(
    ("master", "settings", "missing"),
    [
        ("spark://10.0.0.1:7077", ON, ""),
        ("yarn", ON, ""),
        ("spark://127.0.0.1:7077", {}, ""),
        ("local[2,4]", {}, ""),
        ("spark://10.0.0.1:7077", {}, "spark.authenticate=true and spark.network.crypto.enabled"),
        ("spark://127.0.0.1:1,10.0.0.1:2", {}, "spark.authenticate=true and spark.network.crypto"),
        ("yarn", ON | {"spark.authenticate": "false"}, "spark.authenticate=true where"),
        ("k8s://h:1", ON | {"spark.network.crypto.enabled": None}, "spark.network.crypto.enabled="),
    ],
)
def test_spark_must_be_guarded(master: str, settings: dict[str, str | None], missing: str) -> None:
    """Spark's processes send a join token over the network only if it is encrypted."""
    if not missing:
        spark_settings.check_guarded(master, settings)
        return
    with pytest.raises(BadInput, match=rf"Spark at {re.escape(master)}: expected {missing}"):
        spark_settings.check_guarded(master, settings)


@pytest.mark.parametrize(
    ("url", "fits"),
    [
        ("sc://127.0.0.1:15002", True),
        ("sc://h:1/;use_ssl=true", True),
        ("sc://h:1/;user_id=a;token=b", True),
        ("sc://h:1", False),
        ("sc://h:1/;use_ssl=false", False),
        ("spark://h:1", True),
    ],
)
def test_connect_must_be_encrypted(url: str, fits: bool) -> None:
    """The way to a Connect server on another host is TLS, which a token in its URL implies."""
    if fits:
        spark_settings.check_connect(url)
        return
    with pytest.raises(BadInput, match=r"Spark at sc://h:1/?: expected ;use_ssl=true or ;token="):
        spark_settings.check_connect(url)


def test_a_submission_is_known_by_its_gateway() -> None:
    """`submitted` names no server, and is refused in a program that no spark-submit runs."""
    assert spark_settings.addresses("submitted", {"PYSPARK_GATEWAY_PORT": "1"}) == []
    with pytest.raises(BadInput, match="expected this program to be run by spark-submit"):
        spark_settings.addresses("submitted", {})


@pytest.mark.parametrize(
    ("submitted", "name"),
    [("spark_submit.py", "downpour"), ("nightly", "nightly"), (None, "downpour")],
)
def test_a_submission_keeps_its_name(submitted: str | None, name: str) -> None:
    """Spark names an application by its file; a name of the user stays, and `conf` wins."""
    added = spark_settings.submission("downpour", submitted, {"spark.driver.port": "7078"})
    assert added["spark.app.name"] == name
    assert added["spark.speculation"] == "false"
    assert added["spark.driver.port"] == "7078"
