"""The brokers and Valkey as programs: their settings, their data, their ports."""

import base64
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from deploy.local import parts
from deploy.local.command import output
from deploy.local.errors import LocalStackError, NotAvailable
from deploy.local.ports import HOST
from deploy.local.program import Program

FORMAT_S = 120.0
CONTROLLER_ID, BROKER_ID = 2, 1
CONTROLLER, BROKER, TANSU, VALKEY = "kafka-controller", "kafka-broker", "tansu", "valkey"
VALKEY_MEMORY = "256mb"

_COMMON = {
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "broker.session.timeout.ms": "3000",  # back soon after a kill
    "broker.heartbeat.interval.ms": "500",
}
_BROKER = {
    "inter.broker.listener.name": "PLAINTEXT",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",  # trials of failure need not wait for six seconds each time
    "auto.create.topics.enable": "false",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "offsets.retention.minutes": str(2**31 - 1),  # else the positions of a pool without workers go after a week
    "message.max.bytes": "10485760",
    "replica.fetch.max.bytes": "10485760",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",  # 10 s would hide others' results as long
}


def kafka(home: Path, logs: Path, controller_port: int, broker_port: int, more: Mapping[str, str] | None = None) -> list[Program]:
    """Make Apache Kafka ready to start, in KRaft mode, and give its programs: controller, broker.

    Two processes: one that is both loses the atomicity of transactions when it is killed. The data stays in `home`.
    `more` holds settings of the broker's that go before ours.

    Raises:
        NotAvailable: Neither Java with the jars nor the image can be had here.
        LocalStackError: The data folder cannot be made.
    """
    runtime = parts.kafka_runtime(home)
    home.mkdir(parents=True, exist_ok=True)
    voters = f"{CONTROLLER_ID}@{HOST}:{controller_port}"
    plain = f"PLAINTEXT://{HOST}:{broker_port}"
    settings = {
        "controller": {
            "process.roles": "controller",
            "node.id": str(CONTROLLER_ID),
            "listeners": f"CONTROLLER://{HOST}:{controller_port}",
        },
        "broker": {
            "process.roles": "broker",
            "node.id": str(BROKER_ID),
            "listeners": plain,
            "advertised.listeners": plain,
            **_BROKER,
            **(more or {}),
        },
    }
    log4j = home / "log4j2.properties"
    log4j.write_text((resources.files("deploy.local") / "log4j2.properties").read_text(encoding="utf-8"), encoding="utf-8")
    common = ["-XX:+UseSerialGC", f"-Dlog4j2.configurationFile=file:{log4j}", "-cp", runtime.classpath]
    programs = []
    for role, memory in (("controller", "256m"), ("broker", "768m")):
        path = home / f"{role}.properties"
        own = {"controller.quorum.voters": voters, "log.dirs": str(home / role), **_COMMON, **settings[role]}
        path.write_text("".join(f"{key}={value}\n" for key, value in own.items()), encoding="utf-8")
        _format([*runtime.tool, *common], home, role)
        name = f"kafka-{role}"
        argv = [*runtime.server, "-Xms64m", f"-Xmx{memory}", *common, "kafka.Kafka", str(path)]
        programs.append(Program(name, argv, str(logs / f"{name}.log"), grace_s=15.0, cwd=str(home)))
    return programs


def _format(run: list[str], home: Path, role: str) -> None:
    """Mark an empty data folder as this cluster's; done once."""
    if (home / role / "meta.properties").exists():
        return
    ident = home / "cluster-id"
    if not ident.exists():
        made = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=").replace("-", "A")  # no option's dash in front
        part = home / ".cluster-id.part"
        part.write_text(made, encoding="utf-8")
        part.replace(ident)
    argv = [*run, "kafka.tools.StorageTool", "format", "-t", ident.read_text(encoding="utf-8").strip()]
    try:
        output([*argv, "-c", str(home / f"{role}.properties")], FORMAT_S, cwd=home)
    except NotAvailable as error:  # it is there, so another broker must not quietly take its place
        message = f"Kafka cannot make its data folder {home / role}: {error}"
        raise LocalStackError(message) from None


def tansu(logs: Path, port: int) -> Program:
    """Give Tansu, in memory: no transactions, and nothing survives its end.

    Raises:
        NotAvailable: Its package has no program for this machine.
    """
    url = f"tcp://{HOST}:{port}"
    where = ["--storage-engine", "memory://tansu/", "--listener-url", url, "--advertised-listener-url", url]
    return Program(TANSU, [str(parts.tansu()), "broker", *where], str(logs / f"{TANSU}.log"), grace_s=3.0)


def valkey(home: Path, logs: Path, port: int) -> Program:
    """Give Valkey, on this machine only; what it holds is advice, so nothing is written to disk.

    Raises:
        NotAvailable: Its package has no program for this machine.
    """
    home.mkdir(parents=True, exist_ok=True)
    settings = {
        "bind": HOST,
        "port": str(port),
        "dir": str(home),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "maxmemory": VALKEY_MEMORY,
        "maxmemory-policy": "noeviction",
    }
    argv = [str(parts.valkey_server()), *(word for name, value in settings.items() for word in (f"--{name}", value))]
    return Program(VALKEY, argv, str(logs / f"{VALKEY}.log"), grace_s=5.0, cwd=str(home))
